"""A decode rank that knows nothing of us but the table of the base format: frames, addresses, notifications.

Written from the wire's description alone, on NIXL and ZMQ directly; it must never import `diptych.transfer`, or it
would agree with any mistake made there. Its memory is filled with a pattern first, so that a byte written astray shows.
"""

from __future__ import annotations

import re
import struct
import time
import uuid
from dataclasses import dataclass, field

import numpy as np
import zmq
from numpy.typing import NDArray

PATTERN = 0xA5
NUM_TOP_LOGPROBS = 128
# output ids, logprob values, logprob ids, top logprob values, top logprob ids, hidden state; one row, in bytes
AUX_ROWS = (64, 64, 64, NUM_TOP_LOGPROBS * 4, NUM_TOP_LOGPROBS * 4, 64)
KV_NOTICE = re.compile(rb"([0-9]+)_kv_([0-9]+)_([01])")
AUX_NOTICE = re.compile(rb"([0-9]+)_aux")


@dataclass(frozen=True)
class Shape:
    """The KV that a rank holds: `num_layers` keys, then as many values, each [num_pages, page_size, heads, dim].

    num_parts: 1 where one row a token stands for both (MLA).
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_heads: int
    head_dim: int
    itemsize: int
    num_parts: int = 2

    @property
    def array(self) -> tuple[int, int, int, int]:
        """Shape of one buffer; the last axis is in bytes."""
        return (self.num_pages, self.page_size, self.num_heads, self.head_dim * self.itemsize)


@dataclass
class Arrivals:
    """What has been notified of one room, in order. chunks: (number, is last)."""

    chunks: list[tuple[int, bool]] = field(default_factory=list)
    num_aux: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last chunk, all before it and the aux row are there."""
        last = [number for number, is_last in self.chunks if is_last]
        return bool(last and self.num_aux) and {number for number, _ in self.chunks} == set(range(last[0] + 1))


class BasePeer:
    """One decode rank of the base format."""

    def __init__(self, shape: Shape, *, num_slots: int = 8) -> None:
        from nixl_cu13 import nixl_agent  # NIXL is there for these tests alone

        self.shape = shape
        self.name = str(uuid.uuid4())
        self.agent = nixl_agent(self.name)
        self.kv = [np.full(shape.array, PATTERN, dtype=np.uint8) for _ in range(shape.num_parts * shape.num_layers)]
        self.aux = [np.full((num_slots, nbytes), PATTERN, dtype=np.uint8) for nbytes in AUX_ROWS]
        rows = [(array.ctypes.data, array.nbytes, 0, "") for array in (*self.kv, *self.aux)]
        self.agent.register_memory(rows, "DRAM")
        self.arrivals: dict[int, Arrivals] = {}
        self.strange: list[bytes] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = self._context.socket(zmq.PULL)
        self.port = self.inbox.bind_to_random_port("tcp://127.0.0.1")
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}

    def push(self, address: str, frames: list[bytes]) -> None:
        """Send frames to a prefill rank."""
        if address not in self._outboxes:
            self._outboxes[address] = self._context.socket(zmq.PUSH)
            self._outboxes[address].connect(f"tcp://{address}")
        self._outboxes[address].send_multipart(frames)

    def registration(self) -> list[bytes]:
        """What introduces this rank."""
        return [
            b"NixlMsgGuard",
            b"None",
            b"127.0.0.1",
            str(self.port).encode(),
            self.name.encode(),
            self.agent.get_agent_metadata(),
            b"".join(struct.pack("<Q", array.ctypes.data) for array in self.kv),
            b"".join(struct.pack("<Q", array.ctypes.data) for array in self.aux),
            b"0",
        ]

    def transfer_info(self, room: int, pages: list[int], *, slot: int = 0, num_ranks: int = 1) -> list[bytes]:
        """What names a room; no pages: this rank needs no KV from that one."""
        return [
            b"NixlMsgGuard",
            str(room).encode(),
            b"127.0.0.1",
            str(self.port).encode(),
            self.name.encode(),
            np.array(pages, dtype=np.int32).tobytes(),
            str(slot).encode(),
            str(num_ranks).encode(),
        ]

    def poll(self) -> None:
        """Read NIXL's notifications."""
        for notices in self.agent.get_new_notifs().values():
            for notice in notices:
                self._note(notice)

    def _note(self, notice: bytes) -> None:
        if found := KV_NOTICE.fullmatch(notice):
            room, chunk, last = (int(group) for group in found.groups())
            self.arrivals.setdefault(room, Arrivals()).chunks.append((chunk, bool(last)))
        elif found := AUX_NOTICE.fullmatch(notice):
            self.arrivals.setdefault(int(found[1]), Arrivals()).num_aux += 1
        else:
            self.strange.append(notice)

    def wait(self, *rooms: int, timeout_s: float = 20.0) -> None:
        """Until everything of these rooms has arrived."""
        deadline = time.monotonic() + timeout_s
        while not all(room in self.arrivals and self.arrivals[room].is_complete for room in rooms):
            assert time.monotonic() < deadline, f"of {rooms} only this arrived: {self.arrivals}"
            self.poll()
            time.sleep(0.001)

    def tokens(self, pages: list[int], num_tokens: int) -> NDArray[np.uint8]:
        """The KV of a sequence: uint8 [layer, K or V, token, head, bytes]."""
        taken = np.stack([buffer[pages] for buffer in self.kv])
        flat = taken.reshape(self.shape.num_parts, self.shape.num_layers, -1, *self.shape.array[2:])[:, :, :num_tokens]
        return flat.swapaxes(0, 1)

    def is_untouched_beyond(self, pages: list[int], slots: list[int]) -> bool:
        """Whether nothing but these pages and aux rows was written."""
        others = np.setdiff1d(np.arange(self.shape.num_pages), pages)
        rows = np.setdiff1d(np.arange(len(self.aux[0])), slots)
        return all((b[others] == PATTERN).all() for b in self.kv) and all((b[rows] == PATTERN).all() for b in self.aux)

    def ints(self, buffer: int, slot: int) -> list[int]:
        """An aux row as int32."""
        return self.aux[buffer][slot].view("<i4").tolist()

    def floats(self, buffer: int, slot: int) -> list[float]:
        """An aux row as float32."""
        return self.aux[buffer][slot].view("<f4").tolist()

    def close(self) -> None:
        """Close sockets; the agent ends with the object."""
        self._context.destroy(linger=0)
        del self.agent
