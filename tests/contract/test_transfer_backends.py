"""What `TransferBackend` promises, checked of every implementation; NIXL between two real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import pytest

from diptych.errors import PeerIncompatible, PeerLost, TransferRejected
from diptych.kv.layout import KVLayout
from diptych.transfer.backend import MemoryRegion, TransferBackend, Write, WriteResult
from diptych.transfer.loopback import LoopbackBackend, LoopbackNetwork
from diptych.transfer.plan import Descriptors, page_template, plan

ROOT = Path(__file__).parents[2]
MIB = 2**20
REGION = 128 * MIB
WAIT_S = 10.0


class Receiver(Protocol):
    """The other end: it only polls, and can be looked at."""

    name: str
    metadata: bytes
    address: int

    def notifications(self, count: int, seconds: float = WAIT_S) -> list[tuple[str, bytes]]: ...
    def read(self, start: int, count: int) -> np.ndarray: ...
    def kill(self) -> None: ...


class LoopbackReceiver:
    """In this process, on the same network."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self.name = f"receiver-{uuid.uuid4()}"
        self._backend = LoopbackBackend(network, self.name)
        self._memory = np.zeros(REGION, dtype=np.uint8)
        self.address = self._memory.ctypes.data
        self._backend.register([MemoryRegion(self.address, REGION)])
        self.metadata = self._backend.metadata()

    def notifications(self, count: int, seconds: float = WAIT_S) -> list[tuple[str, bytes]]:
        return self._backend.notifications()

    def read(self, start: int, count: int) -> np.ndarray:
        return self._memory[start : start + count].copy()

    def kill(self) -> None:
        self._backend.close()


class ProcessReceiver:
    """A process with a NIXL agent: `transfer_peer.py`."""

    def __init__(self) -> None:
        self.name = f"receiver-{uuid.uuid4()}"
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("transfer_peer.py")), self.name, str(REGION)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
        self.metadata, self.address = self._answer(tuple[bytes, int])

    def notifications(self, count: int, seconds: float = WAIT_S) -> list[tuple[str, bytes]]:
        self._ask("notifications", count, seconds)
        return self._answer(list[tuple[str, bytes]])

    def read(self, start: int, count: int) -> np.ndarray:
        self._ask("memory", start, count)
        return np.frombuffer(self._answer(bytes), dtype=np.uint8)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def _ask(self, *request: object) -> None:
        self.process.stdin.write(msgspec.json.encode(request) + b"\n")
        self.process.stdin.flush()

    def _answer(self, kind):
        return msgspec.json.decode(self.process.stdout.readline(), type=kind)


class Ends:
    """A sender with a region of known bytes, and the makers of its peers."""

    def __init__(self, sender: TransferBackend, make_receiver) -> None:
        self.sender = sender
        self.make_receiver = make_receiver
        self.memory = np.resize(np.random.default_rng(7).integers(0, 256, MIB - 3, dtype=np.uint8), REGION)
        self.address = self.memory.ctypes.data
        sender.register([MemoryRegion(self.address, REGION)])
        self.receiver: Receiver = make_receiver()
        self.peer = sender.add_peer(self.receiver.metadata)
        self._ended: list[WriteResult] = []

    def write(self, pieces: list[tuple[int, int, int]], notification: bytes = b"n", peer: str | None = None) -> int:
        """pieces: (offset here, offset there, length)."""
        src, dst, nbytes = np.array(pieces, dtype=np.int64).reshape(-1, 3).T.copy()
        descriptors = Descriptors(src + self.address, dst + self.receiver.address, nbytes)
        return self.sender.write(Write(peer=peer or self.peer, descriptors=descriptors, notification=notification))

    def results(self, count: int = 1, seconds: float = WAIT_S) -> list[WriteResult]:
        """Poll until so many writes ended."""
        deadline = time.monotonic() + seconds
        while len(self._ended) < count and time.monotonic() < deadline:
            self._ended += self.sender.poll()
            time.sleep(0.0002)
        found, self._ended = self._ended, []
        return found

    def notifications(self, count: int = 1, seconds: float = WAIT_S) -> list[tuple[str, bytes]]:
        """Wait for so many at the receiver, while both ends poll."""
        found: list[tuple[str, bytes]] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < deadline:
            self._ended += self.sender.poll()
            found += self.receiver.notifications(count - len(found), 0.005)
        return found


@pytest.fixture(params=["loopback", "nixl"])
def ends(request) -> Iterator[Ends]:
    if request.param == "loopback":
        network = LoopbackNetwork()
        yield Ends(LoopbackBackend(network, "sender"), lambda: LoopbackReceiver(network))
        return
    yield from nixl_ends()


@pytest.fixture
def processes() -> Iterator[Ends]:
    """NIXL alone, for what only a process can do."""
    yield from nixl_ends()


def nixl_ends() -> Iterator[Ends]:
    pytest.importorskip("nixl_cu13")
    from diptych.transfer.nixl import NixlBackend

    made: list[ProcessReceiver] = []

    def make_receiver() -> ProcessReceiver:
        made.append(ProcessReceiver())
        return made[-1]

    sender = NixlBackend(f"sender-{uuid.uuid4()}")
    try:
        yield Ends(sender, make_receiver)
    finally:
        for receiver in made:
            if receiver.process.poll() is None:
                receiver.kill()
        sender.close()


def test_bytes_arrive_exactly_where_told(ends):
    generator = random.Random(1)
    slots = generator.sample(range(2000), 600)
    pieces = [(8192 * source, 8192 * slot, 1 + generator.randrange(8000)) for source, slot in enumerate(slots)]
    handle = ends.write(pieces, b"17_kv_0_1")
    assert ends.results() == [WriteResult(handle)]
    assert ends.notifications(1) == [(ends.sender.name, b"17_kv_0_1")]
    expected = np.zeros(2000 * 8192, dtype=np.uint8)
    for source, destination, nbytes in pieces:
        expected[destination : destination + nbytes] = ends.memory[source : source + nbytes]
    assert np.array_equal(ends.receiver.read(0, len(expected)), expected)


def test_data_is_there_when_the_notification_is(ends):
    for round_number in range(5):
        shift = 16 * MIB + round_number
        ends.write([(shift, 0, 4 * MIB)], b"landed")
        assert ends.notifications(1) == [(ends.sender.name, b"landed")]
        assert np.array_equal(ends.receiver.read(0, 4 * MIB), ends.memory[shift : shift + 4 * MIB])
        assert ends.results()[0].ok


def test_a_hundred_megabytes(ends):
    nbytes = 100_000_000
    ends.write([(0, 1000, nbytes)])
    assert [result.ok for result in ends.results()] == [True]
    ends.notifications(1)
    arrived = ends.receiver.read(0, 1000 + nbytes + 1000)
    assert np.array_equal(arrived[1000:-1000], ends.memory[:nbytes])
    assert not arrived[:1000].any() and not arrived[-1000:].any()


def test_a_planned_write_of_adjacent_pages(ends):
    layout = KVLayout.single_rank(4, 2, head_dim=64, page_size=16, dtype="bfloat16")
    descriptors = plan(
        page_template(layout, layout),
        np.array([3, 4, 5, 9]),
        dst_pages=np.array([7, 8, 9, 2]),
        src_base=ends.address,
        dst_bases=[ends.receiver.address],
    )
    assert len(descriptors) == 2
    ends.sender.write(Write(peer=ends.peer, descriptors=descriptors, notification=b"pages"))
    assert ends.results()[0].ok
    ends.notifications(1)
    page = layout.page_nbytes
    for source, destination in ((3, 7), (4, 8), (5, 9), (9, 2)):
        expected = ends.memory[source * page : (source + 1) * page]
        assert np.array_equal(ends.receiver.read(destination * page, page), expected)


def test_many_writes_at_once_each_end_once(ends):
    handles = [ends.write([(index * 4096, index * 4096, 4096)], b"%d" % index) for index in range(100)]
    results = ends.results(100)
    assert sorted(result.handle for result in results) == sorted(handles)
    assert all(result.ok for result in results)
    assert ends.results(1, 0.05) == []
    assert {message for _, message in ends.notifications(100)} == {b"%d" % index for index in range(100)}
    assert ends.sender.num_open_writes == 0


def test_a_write_of_nothing_only_notifies(ends):
    handle = ends.write([], b"empty")
    assert ends.results() == [WriteResult(handle)]
    assert ends.notifications(1) == [(ends.sender.name, b"empty")]


def test_bare_notifications_carry_any_bytes(ends):
    for message in (b"4711_aux", bytes(range(256)), b"x" * 4000):
        ends.sender.notify(ends.peer, message)
        assert ends.notifications(1) == [(ends.sender.name, message)]


@pytest.mark.parametrize("piece", [(REGION - 10, 0, 20), (0, REGION - 10, 20), (0, -4096, 16)])
def test_memory_that_was_not_registered_is_refused(ends, piece):
    handle = ends.write([(0, 0, 8), piece])
    (result,) = ends.results()
    assert result.handle == handle and isinstance(result.error, TransferRejected)
    assert ends.notifications(1, 0.1) == []
    assert ends.sender.num_open_writes == 0


def test_an_unknown_peer_is_an_error_and_no_crash(ends):
    handle = ends.write([(0, 0, 8)], peer="nobody")
    (result,) = ends.results()
    assert result.handle == handle and isinstance(result.error, PeerLost)
    with pytest.raises(PeerLost):
        ends.sender.notify("nobody", b"x")
    ends.sender.remove_peer("nobody")


def test_adding_a_peer_again_changes_nothing(ends):
    assert ends.sender.add_peer(ends.receiver.metadata) == ends.peer == ends.receiver.name
    ends.write([(0, 0, 8)])
    assert ends.results()[0].ok


def test_a_removed_peer_gets_nothing_and_may_come_back(ends):
    ends.sender.remove_peer(ends.peer)
    ends.write([(0, 0, 8)])
    assert isinstance(ends.results()[0].error, PeerLost)
    assert ends.sender.add_peer(ends.receiver.metadata) == ends.peer
    ends.write([(0, 0, 4096)], b"again")
    assert ends.results()[0].ok
    assert ends.notifications(1) == [(ends.sender.name, b"again")]


def test_a_killed_peer_fails_writes_soon_and_a_restarted_one_is_new(ends):
    ends.write([(0, 0, MIB)])
    assert ends.results()[0].ok
    ends.receiver.kill()
    started = time.monotonic()
    for _ in range(3):
        ends.write([(0, 0, MIB)])
        (result,) = ends.results()
        assert isinstance(result.error, PeerLost)
    assert time.monotonic() - started < 3
    assert ends.sender.num_open_writes == 0
    dead = ends.peer
    ends.receiver = ends.make_receiver()
    ends.peer = ends.sender.add_peer(ends.receiver.metadata)
    assert ends.peer != dead
    ends.sender.remove_peer(dead)
    ends.write([(5, 0, MIB)], b"hello")
    assert ends.results()[0].ok
    assert ends.notifications(1) == [(ends.sender.name, b"hello")]
    assert np.array_equal(ends.receiver.read(0, MIB), ends.memory[5 : 5 + MIB])


def test_foreign_metadata_is_refused_and_nothing_breaks(ends):
    good = ends.receiver.metadata
    generator = random.Random(3)
    foreign = [b"", b"x", b"\0" * 100, good[:50], good[:-1], generator.randbytes(300), b'{"name": "x"}', good[1:]]
    for _ in range(60):
        mutated = bytearray(good)
        mutated[generator.randrange(len(good) // 2, len(good))] ^= 1 << generator.randrange(8)
        foreign.append(bytes(mutated))
    accepted = 0
    for metadata in foreign:
        try:
            ends.sender.add_peer(metadata)
        except PeerIncompatible:
            continue
        accepted += 1
    assert accepted <= len(foreign) // 10, "flipped bits in names or keys may pass, garbage may not"
    ends.write([(0, 0, MIB)], b"still here")
    assert ends.results()[0].ok
    assert ends.notifications(1) == [(ends.sender.name, b"still here")]


def test_close_releases_and_may_be_repeated(ends):
    ends.write([(0, 0, 64 * MIB)])
    ends.sender.close()
    assert ends.sender.num_open_writes == 0
    ends.sender.close()


def test_a_process_killed_during_a_write_fails_it(processes):
    processes.write([(0, 0, 8)])
    assert processes.results()[0].ok
    os.kill(processes.receiver.process.pid, signal.SIGSTOP)
    processes.write([(0, 0, 64 * MIB)])
    assert processes.results(1, 0.2) == [], "the write ends only when the peer acknowledges it"
    processes.receiver.kill()
    (result,) = processes.results(1, 3.0)
    assert isinstance(result.error, PeerLost)
    assert processes.sender.num_open_writes == 0


def test_a_frozen_process_can_be_removed_and_hangs_nobody(processes):
    processes.write([(0, 0, 8)])
    assert processes.results()[0].ok
    os.kill(processes.receiver.process.pid, signal.SIGSTOP)
    handles = [processes.write([(0, index * MIB, MIB)]) for index in range(4)]
    started = time.monotonic()
    assert processes.results(1, 0.1) == []
    processes.sender.remove_peer(processes.peer)
    results = processes.results(4, 1.0)
    assert time.monotonic() - started < 2
    assert [result.handle for result in results] == handles
    assert all(isinstance(result.error, PeerLost) for result in results)
    assert processes.sender.num_open_writes == 0
    os.kill(processes.receiver.process.pid, signal.SIGCONT)
    processes.peer = processes.sender.add_peer(processes.receiver.metadata)
    processes.write([(9, 0, MIB)], b"thawed")
    assert processes.results()[0].ok
    assert (processes.sender.name, b"thawed") in processes.notifications(2, 1.0)


def test_the_transport_is_measured(processes):
    assert processes.sender.transport(processes.peer) == "unknown"
    processes.write([(0, 0, 8 * MIB)])
    assert processes.results()[0].ok
    assert processes.sender.transport(processes.peer) in ("shm", "shm or rdma", "tcp")
