"""The agent's thread over the loopback network: every command has its event, nothing raises, an idle thread sleeps."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from diptych.errors import ConfigError, PeerIncompatible, PeerLost, TransferError
from diptych.transfer.agent import (
    AgentFailed,
    AgentReady,
    Notified,
    NotifyFailed,
    PeerAdded,
    PeerRefused,
    PeerRemoved,
    TransferEvent,
    WriteDone,
    WriteFailed,
)
from diptych.transfer.backend import MemoryRegion, TransferBackend, Write
from diptych.transfer.loopback import Faults, LoopbackBackend, LoopbackNetwork
from diptych.transfer.plan import Descriptors
from diptych.worker.transfer_agent import Probe, TransferAgent

SIZE = 1 << 16
WAIT_S = 5.0


class Host:
    """An agent, its memory and its events."""

    def __init__(self, make_backend, fill: int = 0, probe: Probe | None = None) -> None:
        self.bytes = np.full(SIZE, fill, dtype=np.uint8)
        self.events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        regions = [MemoryRegion(self.bytes.ctypes.data, SIZE)]
        self.agent = TransferAgent(make_backend, regions, on_event=self.events.put, probe=probe)
        self.agent.start()
        self.ready = self.next()

    def next(self) -> TransferEvent:
        return self.events.get(timeout=WAIT_S)

    def write(self, write_id: int, to: Host, nbytes: int = SIZE, peer: str | None = None) -> None:
        columns = (self.bytes.ctypes.data, to.bytes.ctypes.data, nbytes)
        descriptors = Descriptors(*(np.array([value]) for value in columns))
        write = Write(peer=peer or to.ready.name, descriptors=descriptors, notification=b"%d" % write_id)
        self.agent.write(write_id, write)


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def hosts(network) -> Iterator[tuple[Host, Host]]:
    source = Host(lambda: LoopbackBackend(network, "source"), 7)
    destination = Host(lambda: LoopbackBackend(network, "destination"))
    source.agent.add_peer("key", destination.ready.metadata)
    assert source.next() == PeerAdded("key", "destination")
    yield source, destination
    source.agent.close()
    destination.agent.close()


def test_a_write_is_done_and_its_peer_is_told(hosts):
    source, destination = hosts
    destination.agent.expect(True)
    source.write(42, destination)
    done = source.next()
    assert isinstance(done, WriteDone)
    assert (done.write_id, done.peer, done.nbytes, done.num_descriptors) == (42, "destination", SIZE, 1)
    assert done.transport == "loopback" and 0 <= done.seconds < WAIT_S
    assert destination.next() == Notified("source", b"42")
    assert (destination.bytes == 7).all()


def test_whoever_expects_nothing_hears_all_the_same(hosts):
    source, destination = hosts
    source.agent.notify("destination", b"stray")
    assert destination.next() == Notified("source", b"stray")


def test_errors_become_events(hosts):
    source, destination = hosts
    source.agent.add_peer("foreign", b"nonsense")
    refused = source.next()
    assert isinstance(refused, PeerRefused) and refused.key == "foreign"
    source.write(1, destination, peer="nobody")
    failed = source.next()
    assert isinstance(failed, WriteFailed) and failed.write_id == 1 and isinstance(failed.error, PeerLost)
    source.agent.notify("nobody", b"x")
    assert isinstance(source.next(), NotifyFailed)
    source.write(2, destination, nbytes=SIZE + 1)
    assert isinstance(source.next(), WriteFailed)
    source.write(3, destination)
    assert isinstance(source.next(), WriteDone)


def test_removing_a_peer_fails_its_writes_first(hosts, network):
    source, destination = hosts
    network.partition("destination")
    source.write(1, destination)
    source.write(2, destination)
    source.agent.remove_peer("destination")
    events = [source.next() for _ in range(3)]
    assert [event.write_id for event in events[:2] if isinstance(event, WriteFailed)] == [1, 2]
    assert events[2] == PeerRemoved("destination")


def test_closing_answers_everything(hosts, network):
    source, destination = hosts
    network.partition("destination")
    source.write(1, destination)
    source.agent.close()
    source.agent.close()
    failed = source.next()
    assert isinstance(failed, WriteFailed) and failed.write_id == 1
    assert source.events.empty()


class PickyProbe:
    """Refuses what says so, after having been let go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.is_closed = False

    def check(self, metadata: bytes) -> frozenset[str]:
        self.may_go_on.wait(WAIT_S)
        if metadata == b"crash":
            raise RuntimeError("the probe itself broke")
        if metadata == b"bad":
            raise PeerIncompatible("damaged")
        return frozenset({"cma"})

    def close(self) -> None:
        self.is_closed = True


def test_metadata_are_probed_while_writes_go_on(hosts, network):
    source, destination = hosts
    probe = PickyProbe()
    prober = Host(lambda: LoopbackBackend(network, "prober"), probe=probe)
    for key, metadata in (("1", b"bad"), ("2", b"crash"), ("3", destination.ready.metadata)):
        prober.agent.add_peer(key, metadata)
    source.write(1, prober)
    assert isinstance(source.next(), WriteFailed), "not a peer of the source"
    prober.agent.notify("nobody", b"x")
    assert isinstance(prober.next(), NotifyFailed), "commands overtake what is being probed"
    probe.may_go_on.set()
    first, second, third = prober.next(), prober.next(), prober.next()
    assert isinstance(first, PeerRefused) and first.key == "1"
    assert isinstance(second, PeerRefused) and second.key == "2" and "RuntimeError" in str(second.error)
    assert third == PeerAdded("3", "destination", frozenset({"cma"}))
    prober.agent.close()
    assert probe.is_closed


def test_a_flood_of_new_peers_is_bounded_and_answered(network):
    probe = PickyProbe()
    host = Host(lambda: LoopbackBackend(network, "flooded"), probe=probe)
    for index in range(400):
        host.agent.add_peer(str(index), b"bad")
    probe.may_go_on.set()
    answers = [host.next() for _ in range(400)]
    assert {event.key for event in answers if isinstance(event, PeerRefused)} == {str(index) for index in range(400)}
    assert sum("too many" in str(event.error) for event in answers if isinstance(event, PeerRefused)) >= 140
    host.agent.close()


def test_a_backend_that_cannot_start_is_an_event():
    def broken() -> TransferBackend:
        raise ConfigError("no such wheel")

    host = Host(broken)
    assert isinstance(host.ready, AgentFailed) and isinstance(host.ready.error, ConfigError)
    host.agent.close()


def test_a_backend_that_breaks_fails_its_writes_and_ends(hosts, network):
    class Breaking(LoopbackBackend):
        def poll(self):
            if self.num_open_writes:
                raise RuntimeError("the library broke its promise")
            return super().poll()

    network.faults = Faults(min_delay_s=100.0, max_delay_s=100.0)
    host = Host(lambda: Breaking(network, "breaking"))
    host.agent.add_peer("key", hosts[1].ready.metadata)
    assert isinstance(host.next(), PeerAdded)
    host.write(9, hosts[1])
    failed, ended = host.next(), host.next()
    assert isinstance(failed, WriteFailed) and failed.write_id == 9 and isinstance(failed.error, TransferError)
    assert isinstance(ended, AgentFailed) and "RuntimeError" in str(ended.error)
    host.agent.close()


def test_commands_from_many_threads_each_have_one_event(hosts):
    source, destination = hosts

    def fifty_writes(first: int) -> None:
        for write_id in range(first, first + 50):
            source.write(write_id, destination, 8)

    threads = [threading.Thread(target=fifty_writes, args=(first,)) for first in range(0, 200, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [source.next() for _ in range(200)]
    assert sorted(event.write_id for event in done if isinstance(event, WriteDone)) == list(range(200))


def test_an_idle_agent_costs_nothing(hosts):
    started, spent = time.monotonic(), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.1 * (time.monotonic() - started)


def test_ready_carries_the_metadata(hosts):
    assert isinstance(hosts[0].ready, AgentReady) and hosts[0].ready.name == "source"


def test_the_module_leaves_torch_and_nixl_unimported():
    code = "import sys, diptych.worker.transfer_agent as _; print({'torch', 'nixl_cu13'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
