"""What the hinge needs from the outside: a network for control messages, and somebody who moves bytes. Plain protocols.

Real ones are ZMQ sockets and a transfer agent's thread; the simulation has its own of both. Everything here is called
on the engine's thread and returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from diptych.transfer.backend import MemorySpace, Write
from diptych.transfer.extension import PeerExtension
from diptych.transfer.handoff import HandoffLayout, HandoffRows, HandoffSlots
from diptych.transfer.ranks import Ranks
from diptych.transfer.wire import Registration


class Network(Protocol):
    """Multipart messages between engines, by address ("host:port"). What is sent may be lost, never reordered per
    pair.
    """

    def send(self, address: str, frames: list[bytes]) -> None:
        """Send, or drop if it cannot be; the first send connects."""
        ...

    def receive(self) -> list[tuple[int, list[bytes]]]:
        """Every message that has arrived, from anybody, with the rank of ours that it was sent to."""
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


class Agent(Protocol):
    """Moves bytes between the memory of one rank and those of peers; what comes of it is told as events of
    `transfer.agent`.
    """

    def add_peer(self, key: str, metadata: bytes) -> None:
        """Meet a peer: PeerAdded or PeerRefused with this key follows."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Forget a peer: WriteFailed for each unfinished write follows."""
        ...

    def write(self, write_id: int, write: Write) -> None:
        """Copy and notify: WriteDone or WriteFailed with this id follows."""
        ...

    def expect(self, is_expecting: bool) -> None:
        """Whether somebody waits for notifications."""
        ...


@dataclass(frozen=True, kw_only=True)
class RankSite:
    """What one rank has. kv_base: address of its pool in its own process, in kv_space."""

    agent_name: str
    agent_metadata: bytes
    kv_base: int
    kv_space: MemorySpace


@dataclass(frozen=True, kw_only=True)
class Site:
    """What this engine is and has. agents, ranks: one a rank. handoff_*: rows, shared by both directions; handoff_base:
    their address in the process of HANDOFF_RANK.

    endpoint: host at which peers reach our control socket, at `port`.
    """

    identity: PeerExtension
    endpoint: str
    port: int
    agents: Sequence[Agent]
    ranks: Sequence[RankSite]
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

    @property
    def shape(self) -> Ranks:
        """Which rank holds what."""
        return self.identity.shape()

    def registration(self) -> Registration:
        """How all ranks introduce themselves to a prefill engine."""
        first = self.ranks[0]
        ranks = [
            msgspec.structs.replace(
                fields,
                agent_name=rank.agent_name,
                agent_metadata=rank.agent_metadata,
                kv_address=rank.kv_base,
                kv_device=rank.kv_space.device,
            )
            for fields, rank in zip(self.identity.ranks, self.ranks, strict=bool(self.identity.ranks))
        ]
        return Registration(
            endpoint=self.endpoint,
            port=self.port,
            agent_name=first.agent_name,
            agent_metadata=first.agent_metadata,
            kv_addresses=(first.kv_base,),
            aux_addresses=self.handoff_layout.addresses(self.handoff_base),
            gpu_id=first.kv_space.device,
            extension=msgspec.structs.replace(self.identity, ranks=ranks),
        )


@dataclass(frozen=True, kw_only=True)
class HingeLimits:
    """Bounds and times of transfers, in seconds; see `TransferConfig`."""

    max_rooms: int = 1024
    room_timeout: float = 30.0
    transfer_timeout: float = 120.0
    write_timeout: float = 5.0
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 2.0
    local_prefill_tokens: int = 0
    allow_local_prefill: bool = True
