"""The agent without a thread, as the simulation uses it."""

from __future__ import annotations

import numpy as np

from diptych.errors import PeerLost
from diptych.transfer.agent import Notified, PeerAdded, StepwiseAgent, TransferEvent, WriteDone, WriteFailed
from diptych.transfer.backend import MemoryRegion, Write
from diptych.transfer.loopback import Faults, LoopbackBackend, LoopbackNetwork
from diptych.transfer.plan import Descriptors


def test_events_come_when_virtual_time_has_passed():
    network = LoopbackNetwork(faults=Faults(min_delay_s=2.0, max_delay_s=2.0))
    memory = np.arange(16, dtype=np.uint8)
    source, destination = LoopbackBackend(network, "source"), LoopbackBackend(network, "destination")
    for backend in (source, destination):
        backend.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    heard: list[TransferEvent] = []
    told: list[TransferEvent] = []
    writer = StepwiseAgent(source, on_event=told.append, clock=lambda: network.now_s)
    reader = StepwiseAgent(destination, on_event=heard.append)
    writer.add_peer("key", destination.metadata())
    columns = (memory.ctypes.data, memory.ctypes.data + 8, 8)
    descriptors = Descriptors(*(np.array([value]) for value in columns))
    writer.write(5, Write(peer="destination", descriptors=descriptors, notification=b"n"))
    writer.poll()
    assert told == [PeerAdded("key", "destination")] and writer.num_unfinished == 1
    network.advance(3.0)
    writer.poll()
    reader.poll()
    assert told[1:] == [WriteDone(5, "destination", 8, 1, 3.0, "loopback")]
    assert heard == [Notified("source", b"n")] and memory[8:].tolist() == list(range(8))


def test_giving_up_reports_each_write_once():
    network = LoopbackNetwork()
    told: list[TransferEvent] = []
    writer = StepwiseAgent(LoopbackBackend(network, "source"), on_event=told.append)
    nothing = Descriptors(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    writer.write(1, Write(peer="nobody", descriptors=nothing, notification=b""))
    writer.give_up(PeerLost("over"))
    writer.poll()
    assert [event.write_id for event in told if isinstance(event, WriteFailed)] == [1]
    assert writer.num_unfinished == 0
