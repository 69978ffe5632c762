"""Damaged metadata against real UCX: they may kill the child, never the process that asks."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from diptych.errors import PeerIncompatible
from diptych.transfer.backend import MemoryKind, MemoryRegion
from diptych.transfer.metadata_probe import MetadataProbe, name_in
from diptych.transfer.ucx import carrier_of

pytest.importorskip("nixl_cu13")


@pytest.fixture(scope="module")
def peer():
    from diptych.transfer.nixl import NixlBackend

    memory = np.zeros(4096, dtype=np.uint8)
    backend = NixlBackend(f"peer-{uuid.uuid4()}")
    backend.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    yield backend
    backend.close()


@pytest.fixture
def probe() -> Iterator[MetadataProbe]:
    made = MetadataProbe(timeout_s=20)
    yield made
    made.close()


def test_good_metadata_pass_again_and_again_and_tell_the_transports(probe, peer):
    for _ in range(3):
        lanes = probe.check(peer.metadata())
        assert carrier_of(MemoryKind.DRAM, lanes) == "shm", lanes


def test_damaged_metadata_do_not_spoil_the_good_ones(probe, peer):
    good = peer.metadata()
    generator = random.Random(5)
    refused = 0
    for _ in range(6):
        damaged = bytearray(good)
        for _ in range(generator.randint(1, 8)):
            damaged[generator.randrange(40, len(good))] = generator.randrange(256)
        try:
            probe.check(bytes(damaged))
        except PeerIncompatible:
            refused += 1
    assert refused
    probe.check(good)


def probe_children() -> list[psutil.Process]:
    """Children of this process that are a probe's; other tests keep servers running."""
    return [child for child in psutil.Process().children() if "serve_probe" in " ".join(child.cmdline())]


def test_a_child_that_died_is_replaced(probe, peer):
    probe.check(peer.metadata())
    (child,) = probe_children()
    child.kill()
    child.wait()
    probe.check(peer.metadata())


@pytest.mark.parametrize("foreign", [b"", b"x" * 1000, b"nixlSerDes|Agent", b"nixlSerDes|Agent" + b"\xff" * 8])
def test_what_names_no_agent_costs_no_child(probe, foreign):
    (child,) = probe_children()
    with pytest.raises(PeerIncompatible):
        probe.check(foreign)
    assert probe_children() == [child]


def test_the_name_is_found(peer):
    assert name_in(peer.metadata()) == peer.name
    assert name_in(b"nixlSerDes|Agent\x02\0\0\0\0\0\0\0ab|Conns") == "ab"
