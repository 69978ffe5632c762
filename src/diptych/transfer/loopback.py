"""A transfer backend within one process, over a network that can be told to misbehave. For tests and simulations.

`LoopbackNetwork` owns virtual time and what is on the wire; `LoopbackBackend` is one agent on it. Bytes are really
copied between registered regions, but only when the network delivers, so whatever frees or reads pages too early is
found out. All choices come from one seeded generator: the same calls give the same outcome.
"""

from __future__ import annotations

import ctypes
import heapq
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.errors import PeerIncompatible, PeerLost, TransferError, TransferRejected
from diptych.transfer.backend import MemoryRegion, Write, WriteResult
from diptych.transfer.plan import Descriptors

_MAGIC = b"diptych-loopback:"


@dataclass(slots=True, kw_only=True)
class Faults:
    """What the network does wrong; probabilities in [0, 1], drawn once for each operation.

    min_delay_s, max_delay_s: virtual seconds from posting to delivery; unequal ones reorder. drop_notification: it is
    lost although the write succeeds. duplicate_notification: it comes twice. fail_write: half of the descriptors land,
    then the write fails. All zero: everything arrives at once, in order.
    """

    min_delay_s: float = 0.0
    max_delay_s: float = 0.0
    drop_notification: float = 0.0
    duplicate_notification: float = 0.0
    fail_write: float = 0.0


@dataclass(slots=True, order=True)
class _Operation:
    """Something on the wire. descriptors: None for a bare notification. handle: of the sender's write."""

    due_s: float
    serial: int
    source: LoopbackBackend = field(compare=False)
    destination: LoopbackBackend = field(compare=False)
    notification: bytes = field(compare=False)
    descriptors: Descriptors | None = field(compare=False, default=None)
    handle: int = field(compare=False, default=-1)


class LoopbackNetwork:
    """Joins agents, holds what they sent until it is due, and breaks as told. May be shared by threads.

    Time stands still until `advance`; whatever is due is delivered when any agent polls.
    """

    def __init__(self, *, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.now_s = 0.0
        self._random = random.Random(seed)
        self.lock = threading.RLock()
        self._agents: dict[bytes, LoopbackBackend] = {}
        self._partitioned: set[str] = set()
        self._wire: list[_Operation] = []
        self._held: list[_Operation] = []
        self._num_agents = 0
        self._num_operations = 0

    @property
    def num_in_flight(self) -> int:
        """Operations sent and not yet delivered, failed or lost."""
        return len(self._wire) + len(self._held)

    @property
    def next_due_s(self) -> float | None:
        """When the next operation will be delivered, if one is on its way."""
        return self._wire[0].due_s if self._wire else None

    def advance(self, seconds: float) -> None:
        """Let virtual time pass and deliver what falls due, in order."""
        with self.lock:
            self.now_s += seconds
            self.deliver()

    def deliver(self) -> None:
        """Deliver what is due now."""
        with self.lock:
            while self._wire and self._wire[0].due_s <= self.now_s:
                operation = heapq.heappop(self._wire)
                if {operation.source.name, operation.destination.name} & self._partitioned:
                    self._held.append(operation)
                else:
                    self._deliver(operation)

    def partition(self, name: str) -> None:
        """Cut an agent off: what is sent to or from it waits until `heal`; neither side is told."""
        with self.lock:
            self._partitioned.add(name)

    def heal(self, name: str) -> None:
        """Join an agent again; what waited is delivered at once."""
        with self.lock:
            self._partitioned.discard(name)
            held, self._held = self._held, []
            for operation in held:
                heapq.heappush(self._wire, operation)
            self.deliver()

    def kill(self, agent: LoopbackBackend) -> None:
        """An agent's process dies: nothing that it posted lands any more, and writes to it fail with PeerLost."""
        with self.lock:
            agent.is_alive = False
            self._wire = [operation for operation in self._wire if operation.source.is_alive]
            self._held = [operation for operation in self._held if operation.source.is_alive]
            heapq.heapify(self._wire)

    def join(self, agent: LoopbackBackend) -> bytes:
        """Add an agent; returns its metadata, never the same twice."""
        with self.lock:
            self._num_agents += 1
            metadata = _MAGIC + f"{self._num_agents}:{agent.name}".encode()
            self._agents[metadata] = agent
            return metadata

    def find(self, metadata: bytes) -> LoopbackBackend:
        """The agent, alive or dead, that gave this metadata. Raises PeerIncompatible if none did."""
        agent = self._agents.get(metadata)
        if agent is None:
            raise PeerIncompatible(f"{len(metadata)} bytes are not the metadata of an agent on this network")
        return agent

    def send(
        self,
        source: LoopbackBackend,
        destination: LoopbackBackend,
        *,
        notification: bytes,
        descriptors: Descriptors | None = None,
        handle: int = -1,
    ) -> None:
        """Put an operation on the wire."""
        with self.lock:
            self._num_operations += 1
            due_s = self.now_s + self._random.uniform(self.faults.min_delay_s, self.faults.max_delay_s)
            heapq.heappush(
                self._wire,
                _Operation(due_s, self._num_operations, source, destination, notification, descriptors, handle),
            )

    def _deliver(self, operation: _Operation) -> None:
        source, destination = operation.source, operation.destination
        if not destination.is_alive:
            source.end_write(operation.handle, PeerLost(f"agent {destination.name} is dead"))
            return
        if operation.descriptors is not None:
            fails = self._random.random() < self.faults.fail_write
            count = len(operation.descriptors) // 2 if fails else len(operation.descriptors)
            error = _copy(source, destination, operation.descriptors, count)
            if fails and error is None:
                error = TransferError(f"the write to {destination.name} failed half-way, as the network was told to")
            was_open = source.end_write(operation.handle, error)
            if error is not None or not was_open:
                return
        if self._random.random() >= self.faults.drop_notification:
            destination.inbox.append((source.name, operation.notification))
            if self._random.random() < self.faults.duplicate_notification:
                destination.inbox.append((source.name, operation.notification))


class LoopbackBackend:
    """One agent on a `LoopbackNetwork`; see `TransferBackend` for what each method promises."""

    def __init__(self, network: LoopbackNetwork, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.inbox: list[tuple[str, bytes]] = []
        self.regions: list[MemoryRegion] = []
        self._network = network
        self._metadata = network.join(self)
        self._peers: dict[str, LoopbackBackend] = {}
        self._open: dict[int, str] = {}
        self._ended: list[WriteResult] = []
        self._num_writes = 0

    @property
    def num_open_writes(self) -> int:
        """Writes posted and not yet ended."""
        return len(self._open)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Allow reads and writes of `regions`."""
        self.regions.extend(regions)

    def metadata(self) -> bytes:
        """What a peer on the same network needs."""
        return self._metadata

    def add_peer(self, metadata: bytes) -> str:
        """Meet the agent that gave this metadata."""
        peer = self._network.find(metadata)
        if self._peers.setdefault(peer.name, peer) is not peer:
            raise PeerIncompatible(f"a peer named {peer.name!r} is known with other metadata; remove it first")
        return peer.name

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Its unfinished writes end as failed, and still land when the network delivers them."""
        with self._network.lock:
            self._peers.pop(peer, None)
            for handle in [handle for handle, to in self._open.items() if to == peer]:
                self.end_write(handle, PeerLost(f"peer {peer} was removed before the write ended"))

    def write(self, write: Write) -> int:
        """Put a write on the wire."""
        peer, descriptors = write.peer, write.descriptors
        with self._network.lock:
            self._num_writes += 1
            handle = self._num_writes
            self._open[handle] = peer
            error = self._refusal(peer, descriptors)
            if error is not None:
                self.end_write(handle, error)
            else:
                self._network.send(
                    self, self._peers[peer], notification=write.notification, descriptors=descriptors, handle=handle
                )
            return handle

    def poll(self) -> list[WriteResult]:
        """Writes that ended since the last call."""
        with self._network.lock:
            self._network.deliver()
            ended, self._ended = self._ended, []
            return ended

    def notify(self, peer: str, message: bytes) -> None:
        """Put a notification on the wire."""
        if peer not in self._peers or not self._peers[peer].is_alive:
            raise PeerLost(f"agent {self.name} knows no living peer {peer!r}")
        self._network.send(self, self._peers[peer], notification=message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Notifications that arrived since the last call."""
        with self._network.lock:
            self._network.deliver()
            arrived, self.inbox = self.inbox, []
            return arrived

    def transport(self, peer: str) -> str:
        """Always "loopback"."""
        return "loopback"

    def close(self) -> None:
        """Leave the network as a process that ends does."""
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._network.kill(self)

    def end_write(self, handle: int, error: TransferError | None) -> bool:
        """The network reports how a write went; False if it had been given up already, so that nobody is to be told."""
        if self._open.pop(handle, None) is None:
            return False
        self._ended.append(WriteResult(handle, error))
        return True

    def _refusal(self, peer: str, descriptors: Descriptors) -> TransferError | None:
        """Why a write cannot be posted at all."""
        if peer not in self._peers:
            return PeerLost(f"agent {self.name} knows no peer {peer!r}")
        if not all(
            _holds(self.regions, int(address), int(nbytes))
            for address, nbytes in zip(descriptors.src, descriptors.nbytes, strict=True)
        ):
            return TransferRejected(f"a write to {peer} reads memory that agent {self.name} has not registered")
        return None


def _holds(regions: Sequence[MemoryRegion], address: int, nbytes: int) -> bool:
    """Whether one region contains all of these bytes."""
    return any(region.address <= address and address + nbytes <= region.address + region.nbytes for region in regions)


def _copy(
    source: LoopbackBackend, destination: LoopbackBackend, descriptors: Descriptors, count: int
) -> TransferError | None:
    """Copy the first `count` pieces; says why not if the destination has not registered one of them."""
    columns = (descriptors.src[:count], descriptors.dst[:count], descriptors.nbytes[:count])
    pieces = [tuple(map(int, piece)) for piece in zip(*columns, strict=True)]
    if not all(_holds(destination.regions, address, nbytes) for _, address, nbytes in pieces):
        return TransferRejected(f"a write from {source.name} goes to memory that {destination.name} has not registered")
    for from_address, to_address, nbytes in pieces:
        ctypes.memmove(to_address, from_address, nbytes)
    return None
