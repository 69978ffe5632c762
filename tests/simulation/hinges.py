"""One rank's site over plain memory, with a network and a mover that only take notes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from diptych.kv.layout import KVLayout
from diptych.transfer.backend import HOST, MemorySpace
from diptych.transfer.control import CONTROL_GUARD, ControlMessage, decode_control
from diptych.transfer.extension import LayoutFields, PeerExtension
from diptych.transfer.handoff import HandoffLayout, HandoffRows, HandoffSlots
from diptych.transfer.plan import Descriptors
from diptych.transfer.ports import Site
from diptych.transfer.wire import Registration, TransferInfo, decode_frames

LAYOUT = KVLayout.single_rank(1, 1, head_dim=1, page_size=4, dtype="float32")
NUM_PAGES = 32


@dataclass
class Notes:
    """A network and a mover in one."""

    sent: list[tuple[str, ControlMessage | Registration | TransferInfo]] = field(default_factory=list)
    commands: list[tuple[object, ...]] = field(default_factory=list)
    is_unreachable: bool = False

    def send(self, address: str, frames: list[bytes]) -> None:
        is_control = frames[0] == CONTROL_GUARD
        self.sent.append((address, decode_control(frames).message if is_control else decode_frames(frames)))

    def receive(self) -> list[list[bytes]]:
        return []

    def is_refused(self, address: str) -> bool:
        return False

    def withdraw(self, address: str) -> bool:
        self.commands.append(("withdraw", address))
        return self.is_unreachable

    def forget(self, address: str) -> None:
        self.commands.append(("forget", address))

    def add_peer(self, key: str, metadata: bytes) -> None:
        self.commands.append(("add_peer", key, metadata))

    def remove_peer(self, peer: str) -> None:
        self.commands.append(("remove_peer", peer))

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
        self.commands.append(("write", write_id, peer, notification))

    def expect(self, is_expecting: bool) -> None:
        self.commands.append(("expect", is_expecting))

    def told(self, kind: type) -> list[object]:
        """Messages of one type, in order."""
        return [message for _, message in self.sent if isinstance(message, kind)]


def site(name: str, *, num_slots: int = 4) -> Site:
    """A rank called `name`, at "127.0.0.1:1"."""
    handoff = HandoffLayout(num_slots=num_slots, num_top_logprobs=4, hidden_nbytes=0)
    rows = np.zeros(handoff.nbytes, dtype=np.uint8)
    return Site(
        identity=identity(name),
        endpoint="127.0.0.1",
        port=1,
        agent_name=f"agent-{name}",
        agent_metadata=b"metadata",
        layout=LAYOUT,
        kv_base=1 << 20,
        kv_space=HOST,
        handoff_layout=handoff,
        handoff_base=rows.ctypes.data,
        handoff_rows=HandoffRows(handoff, rows),
        handoff_slots=HandoffSlots(num_slots),
    )


def identity(name: str, layout: KVLayout = LAYOUT) -> PeerExtension:
    """What the rank says of itself."""
    return PeerExtension(
        instance_id=name,
        layout=LayoutFields.of(layout, NUM_PAGES),
        model_layers=1,
        model_kv_heads=1,
        model_fingerprint="m",
        control_endpoint="127.0.0.1:1",
        num_top_logprobs=4,
    )
