"""The misbehaving network: bytes move only when it delivers, every fault does what it says, and a seed replays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import PeerIncompatible, PeerLost, TransferError
from diptych.transfer.backend import MemoryRegion, Write
from diptych.transfer.loopback import Faults, LoopbackBackend, LoopbackNetwork
from diptych.transfer.plan import Descriptors

SIZE = 1 << 12


class Agent(LoopbackBackend):
    """One with a region of its own."""

    def __init__(self, network: LoopbackNetwork, name: str, fill: int = 0) -> None:
        super().__init__(network, name)
        self.bytes = np.full(SIZE, fill, dtype=np.uint8)
        self.register([MemoryRegion(self.bytes.ctypes.data, SIZE)])

    def send(self, peer: Agent, notification: bytes, *, start: int = 0, count: int = SIZE) -> int:
        self.add_peer(peer.metadata())
        columns = (self.bytes.ctypes.data + start, peer.bytes.ctypes.data + start, count)
        descriptors = Descriptors(*(np.array([value]) for value in columns))
        return self.write(Write(peer=peer.name, descriptors=descriptors, notification=notification))


def pair(**faults: float) -> tuple[LoopbackNetwork, Agent, Agent]:
    network = LoopbackNetwork(seed=1, faults=Faults(**faults))
    return network, Agent(network, "source", 7), Agent(network, "destination")


def test_nothing_moves_before_its_time():
    network, source, destination = pair(min_delay_s=1.0, max_delay_s=1.0)
    handle = source.send(destination, b"n")
    network.advance(0.9)
    assert source.poll() == [] and destination.notifications() == [] and not destination.bytes.any()
    assert network.num_in_flight == 1 and network.next_due_s == 1.0
    network.advance(0.2)
    assert [result.handle for result in source.poll()] == [handle]
    assert destination.notifications() == [("source", b"n")]
    assert (destination.bytes == 7).all() and network.num_in_flight == 0


def test_the_source_is_read_at_delivery():
    network, source, destination = pair(min_delay_s=1.0, max_delay_s=1.0)
    source.send(destination, b"n")
    source.bytes[:] = 9
    network.advance(1.0)
    assert (destination.bytes == 9).all()


def test_a_failing_write_lands_by_half_and_notifies_nobody():
    _, source, destination = pair(fail_write=1.0)
    source.add_peer(destination.metadata())
    offsets = np.arange(4) * 16
    addresses = (source.bytes.ctypes.data + offsets, destination.bytes.ctypes.data + offsets)
    descriptors = Descriptors(*addresses, np.full(4, 16))
    source.write(Write(peer="destination", descriptors=descriptors, notification=b"n"))
    (result,) = source.poll()
    assert isinstance(result.error, TransferError)
    assert destination.bytes.sum() == 2 * 16 * 7 and destination.notifications() == []


def test_a_dropped_notification_leaves_the_write_done():
    _, source, destination = pair(drop_notification=1.0)
    source.send(destination, b"n")
    assert source.poll()[0].ok and destination.notifications() == [] and (destination.bytes == 7).all()


def test_a_duplicated_notification_comes_twice():
    _, source, destination = pair(duplicate_notification=1.0)
    source.send(destination, b"n")
    assert destination.notifications() == [("source", b"n")] * 2


def test_a_partition_holds_everything_back_until_it_heals():
    network, source, destination = pair()
    network.partition("destination")
    source.send(destination, b"n")
    network.advance(60)
    assert source.poll() == [] and destination.notifications() == []
    network.heal("destination")
    assert source.poll()[0].ok and destination.notifications() == [("source", b"n")]


def test_a_write_lands_after_its_peer_was_removed():
    network, source, destination = pair(min_delay_s=1.0, max_delay_s=1.0)
    source.send(destination, b"n")
    source.remove_peer("destination")
    (result,) = source.poll()
    assert isinstance(result.error, PeerLost)
    network.advance(1.0)
    assert (destination.bytes == 7).all(), "a posted write cannot be called back"
    assert source.poll() == [] and destination.notifications() == []


def test_nothing_of_a_dead_sender_lands():
    network, source, destination = pair(min_delay_s=1.0, max_delay_s=1.0)
    source.send(destination, b"n")
    network.kill(source)
    network.advance(2.0)
    assert not destination.bytes.any() and destination.notifications() == []


def test_a_write_to_the_dead_fails_and_a_restart_needs_a_new_name():
    network, source, destination = pair()
    source.add_peer(destination.metadata())
    network.kill(destination)
    source.send(destination, b"n")
    assert isinstance(source.poll()[0].error, PeerLost)
    with pytest.raises(PeerLost):
        source.notify("destination", b"n")
    again = Agent(network, "destination")
    with pytest.raises(PeerIncompatible):
        source.add_peer(again.metadata())
    source.remove_peer("destination")
    source.send(again, b"n")
    assert source.poll()[0].ok and again.notifications() == [("source", b"n")]


@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
def test_every_write_ends_once_and_a_seed_replays(seed, count):
    def outcome() -> tuple[list[int], list[tuple[str, bytes]], bytes]:
        faults = Faults(
            max_delay_s=1.0, drop_notification=0.2, duplicate_notification=0.2, fail_write=0.2, min_delay_s=0.1
        )
        network = LoopbackNetwork(seed=seed, faults=faults)
        source, destination = Agent(network, "source", 7), Agent(network, "destination")
        handles = [source.send(destination, b"%d" % index, start=64 * index, count=64) for index in range(count)]
        assert source.poll() == []
        network.advance(1.0)
        results = source.poll()
        assert sorted(result.handle for result in results) == sorted(handles)
        assert network.num_in_flight == source.num_open_writes == 0
        news = destination.notifications()
        done = {result.handle for result in results if result.ok}
        assert {int(message) + 1 for _, message in news} <= done
        return [result.handle for result in results], news, destination.bytes.tobytes()

    assert outcome() == outcome()
