"""The agent in a rank's process, commanded by frames as an engine does: what it writes, when, and what it tells."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from diptych.core.messages import EngineInfo
from diptych.engine.rank_agent import RankAgent
from diptych.transfer.agent import AgentReady, Notified, PeerAdded, TransferEvent, WriteDone
from diptych.transfer.backend import Write
from diptych.transfer.loopback import LoopbackBackend, LoopbackNetwork
from diptych.transfer.plan import Descriptors
from diptych.transfer.remote_agent import Opened, RemoteAgent, decode_news, event_of
from diptych.transfer.shared_rows import SharedRows

NBYTES = 4096
WAIT_S = 5.0


class Rank:
    """A rank's agent and its engine's end of it. last_step: of the engine."""

    def __init__(self, network: LoopbackNetwork, name: str, fill: int) -> None:
        self.pool = np.full(NBYTES, fill, dtype=np.uint8)
        self.host = RankAgent(lambda agent, _: LoopbackBackend(network, agent), lambda: None)
        self.host.loaded(info_of(self.pool))
        self.last_step = -1
        self.shared = SharedRows(256)
        self.remote = RemoteAgent(self.host.obey, lambda: self.last_step)
        self.remote.open(name, host="127.0.0.1", rows_path=self.shared.path, rows_nbytes=256)
        opened = self.next()
        assert isinstance(opened, Opened)
        self.opened = opened

    def next(self) -> object:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for body in self.host.news():
                return decode_news(body)
            time.sleep(0.001)
        raise AssertionError("nothing was told")

    def next_event(self) -> TransferEvent:
        return event_of(self.next())

    def close(self) -> None:
        self.host.close()
        self.shared.close()


def info_of(pool: np.ndarray) -> EngineInfo:
    return EngineInfo(
        model_path="none",
        architecture="none",
        dtype="float32",
        vocab_size=1,
        max_model_len=1,
        eos_token_ids=(),
        page_size=1,
        num_pages=1,
        page_nbytes=pool.nbytes,
        max_num_seqs=1,
        device="cpu",
        attention_backend="none",
        load_s=0.0,
        kv_address=pool.ctypes.data,
    )


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    network = LoopbackNetwork()
    pair = Rank(network, "source", 7), Rank(network, "destination", 0)
    yield pair
    for rank in pair:
        rank.close()


def write_to(there: Rank) -> Write:
    addresses = [np.array([each], dtype=np.int64) for each in (there.pool.ctypes.data, NBYTES)]
    descriptors = Descriptors(np.zeros(1, dtype=np.int64), *addresses)
    return Write(peer="destination", descriptors=descriptors, notification=b"n")


def test_a_write_waits_for_the_step_whose_pages_it_reads(ranks: tuple[Rank, Rank]) -> None:
    here, there = ranks
    here.remote.add_peer("key", there.opened.metadata)
    assert here.next_event() == PeerAdded("key", "destination")
    write = write_to(there)
    write.descriptors.src[0] = here.opened.kv_address
    here.last_step = 3  # the engine has heard of it from another rank
    here.remote.write(1, write)
    here.host.done(2)
    time.sleep(0.05)
    assert not here.host.news() and not there.pool.any()
    here.host.done(3)
    done = here.next_event()
    assert isinstance(done, WriteDone) and (done.write_id, done.nbytes) == (1, NBYTES)
    assert there.next_event() == Notified("source", b"n") and (there.pool == 7).all()


def test_rows_are_shared_with_the_engine(ranks: tuple[Rank, Rank]) -> None:
    here, there = ranks
    here.remote.add_peer("key", there.opened.metadata)
    here.next()
    here.shared.rows[:] = 5
    addresses = (here.opened.rows_address, there.opened.rows_address, 256)
    descriptors = Descriptors(*(np.array([each], dtype=np.int64) for each in addresses))
    here.remote.write(1, Write(peer="destination", descriptors=descriptors, notification=b"n"))
    there.next()
    assert (there.shared.rows == 5).all()


def test_its_lifeline_is_refused_once_it_has_ended(ranks: tuple[Rank, Rank]) -> None:
    host, _, port = ranks[0].opened.lifeline.rpartition(":")
    socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    ranks[0].remote.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=WAIT_S)


def test_it_may_be_opened_again(ranks: tuple[Rank, Rank]) -> None:
    here = ranks[0]
    here.remote.close()
    here.remote.open("again", host="127.0.0.1", rows_path="", rows_nbytes=0)
    opened = here.next()
    assert isinstance(opened, Opened) and event_of(opened) == AgentReady("again", opened.metadata)
