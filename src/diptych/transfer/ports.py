"""What the hinge needs from the outside: a network for control messages, and somebody who moves bytes. Plain protocols.

Real ones are ZMQ sockets and a transfer agent's thread; the simulation has its own of both. Everything here is called
on the engine's thread and returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from diptych.kv.layout import KVLayout
from diptych.transfer.backend import HOST, MemorySpace
from diptych.transfer.extension import PeerExtension
from diptych.transfer.handoff import HandoffLayout, HandoffRows, HandoffSlots
from diptych.transfer.plan import Descriptors


class Network(Protocol):
    """Multipart messages between engines, by address ("host:port"). What is sent may be lost, never reordered per
    pair.
    """

    def send(self, address: str, frames: list[bytes]) -> None:
        """Send, or drop if it cannot be; the first send connects."""
        ...

    def receive(self) -> list[list[bytes]]:
        """Every message that has arrived, from anybody."""
        ...

    def is_refused(self, address: str) -> bool:
        """Whether the host answers that nobody listens there: the process that did is dead."""
        ...

    def withdraw(self, address: str) -> bool:
        """Take back what was sent there and has not left; whether it is certain that nothing ever has. May take a
        moment.
        """
        ...

    def forget(self, address: str) -> None:
        """Close the connection; what was not sent is dropped."""
        ...


class Mover(Protocol):
    """Moves bytes to peers' memories; what comes of it is told as events of `transfer.agent`."""

    def add_peer(self, key: str, metadata: bytes) -> None:
        """Meet a peer: PeerAdded or PeerRefused with this key follows."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Forget a peer: WriteFailed for each unfinished write follows."""
        ...

    def write(
        self,
        write_id: int,
        peer: str,
        *,
        descriptors: Descriptors,
        notification: bytes,
        source: MemorySpace = HOST,
        destination: MemorySpace = HOST,
    ) -> None:
        """Copy and notify: WriteDone or WriteFailed with this id follows."""
        ...

    def expect(self, is_expecting: bool) -> None:
        """Whether somebody waits for notifications."""
        ...


@dataclass(frozen=True, kw_only=True)
class Site:
    """What this rank is and has. kv_base: address of the pool, in kv_space. handoff_*: its rows, shared by both
    directions.

    endpoint: host at which peers reach our control socket, at `port`.
    """

    identity: PeerExtension
    endpoint: str
    port: int
    agent_name: str
    agent_metadata: bytes
    layout: KVLayout
    kv_base: int
    kv_space: MemorySpace
    handoff_layout: HandoffLayout
    handoff_base: int
    handoff_rows: HandoffRows
    handoff_slots: HandoffSlots

    @property
    def instance_id(self) -> str:
        """New at every start of the engine."""
        return self.identity.instance_id

    @property
    def address(self) -> str:
        """Where peers send control messages to."""
        return f"{self.endpoint}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class HingeLimits:
    """Bounds and times of transfers, in seconds; see `TransferConfig`."""

    max_rooms: int = 1024
    room_timeout: float = 30.0
    transfer_timeout: float = 120.0
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 2.0
    local_prefill_tokens: int = 0
    allow_local_prefill: bool = True
