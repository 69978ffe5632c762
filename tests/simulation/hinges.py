"""One engine's site over plain memory, with a network and agents that only take notes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from diptych.kv.layout import KVLayout
from diptych.transfer.backend import HOST, Write
from diptych.transfer.control import CONTROL_GUARD, ControlMessage, decode_control
from diptych.transfer.extension import LayoutFields, PeerExtension, RankFields
from diptych.transfer.handoff import HandoffLayout, HandoffRows, HandoffSlots
from diptych.transfer.plan import shards
from diptych.transfer.ports import RankSite, Site
from diptych.transfer.wire import Registration, TransferInfo, decode_frames

LAYOUT = KVLayout.single_rank(1, 1, head_dim=1, page_size=4, dtype="float32")
NUM_PAGES = 32


@dataclass
class Notes:
    """A network and an agent in one. commands: to the agents of ranks, the rank last."""

    sent: list[tuple[str, ControlMessage | Registration | TransferInfo]] = field(default_factory=list)
    commands: list[tuple[object, ...]] = field(default_factory=list)
    is_unreachable: bool = False
    inbox: list[tuple[int, list[bytes]]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def send(self, address: str, frames: list[bytes]) -> None:
        is_control = frames[0] == CONTROL_GUARD
        self.sent.append((address, decode_control(frames).message if is_control else decode_frames(frames)))

    def receive(self) -> list[tuple[int, list[bytes]]]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def is_refused(self, address: str) -> bool:
        return address in self.refused

    def withdraw(self, address: str) -> bool:
        self.commands.append(("withdraw", address))
        return self.is_unreachable

    def forget(self, address: str) -> None:
        self.commands.append(("forget", address))

    def told(self, kind: type) -> list[object]:
        """Messages of one type, in order."""
        return [message for _, message in self.sent if isinstance(message, kind)]


@dataclass
class NotingAgent:
    """The agent of one rank."""

    notes: Notes
    rank: int

    def add_peer(self, key: str, metadata: bytes) -> None:
        self.notes.commands.append(("add_peer", key, metadata, self.rank))

    def remove_peer(self, peer: str) -> None:
        self.notes.commands.append(("remove_peer", peer, self.rank))

    def write(self, write_id: int, write: Write) -> None:
        self.notes.commands.append(("write", write_id, write.peer, write.notification, self.rank))

    def expect(self, is_expecting: bool) -> None:
        self.notes.commands.append(("expect", is_expecting, self.rank))


def site(
    name: str, notes: Notes, *, num_slots: int = 4, layout: KVLayout = LAYOUT, shape: tuple[int, int] = (1, 1)
) -> Site:
    """An engine called `name`, at "127.0.0.1:1", of tp x pp ranks."""
    handoff = HandoffLayout(num_slots=num_slots, num_top_logprobs=4, hidden_nbytes=0)
    rows = np.zeros(handoff.nbytes, dtype=np.uint8)
    num_ranks = shape[0] * shape[1]
    return Site(
        identity=identity(name, layout, shape=shape),
        endpoint="127.0.0.1",
        port=1,
        agents=[NotingAgent(notes, rank) for rank in range(num_ranks)],
        ranks=[
            RankSite(
                agent_name=agent_of(name, rank),
                agent_metadata=b"metadata-%d" % rank,
                kv_base=(1 << 20) + (rank << 30),
                kv_space=HOST,
            )
            for rank in range(num_ranks)
        ],
        handoff_layout=handoff,
        handoff_base=rows.ctypes.data,
        handoff_rows=HandoffRows(handoff, rows),
        handoff_slots=HandoffSlots(num_slots),
    )


def agent_of(name: str, rank: int) -> str:
    """Of a rank of an engine."""
    return f"agent-{name}" if rank == 0 else f"agent-{name}-{rank}"


def identity(name: str, layout: KVLayout = LAYOUT, *, shape: tuple[int, int] = (1, 1)) -> PeerExtension:
    """What an engine of tp x pp ranks says of itself; layout: of all of them together."""
    layouts = [LayoutFields.of(part, NUM_PAGES) for part in shards(layout, tp_size=shape[0], pp_size=shape[1])]
    ranks = [RankFields(layout=part, lifeline=f"127.0.0.1:{100 + rank}") for rank, part in enumerate(layouts)]
    return PeerExtension(
        instance_id=name,
        layout=layouts[0],
        model_layers=layout.num_layers,
        model_kv_heads=layout.num_kv_heads,
        model_fingerprint="m",
        tp_size=shape[0],
        pp_size=shape[1],
        ranks=ranks if len(ranks) > 1 else [],
        control_endpoint="127.0.0.1:1",
        num_top_logprobs=4,
    )
