"""What moves bytes between the memories of two processes: the protocol that every technology implements.

Knows addresses, devices and names of agents; no pages, rooms or requests. One agent a worker; whoever makes a backend
calls it from one thread only. Never imports torch.

What every implementation promises (`tests/contract/test_transfer_backends.py` checks it):
- a write's notification is readable at the peer only after all of its bytes are;
- a write that cannot succeed ends in a failed `WriteResult`; it may have landed in part;
- a posted write cannot be called back: it may land after `remove_peer`, until the peer or this process is dead;
- a write may end only when the peer polls, too: whoever waits for one must;
- what a peer sends (metadata, notifications) never raises anything but the errors named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from diptych.errors import TransferError
from diptych.transfer.plan import Descriptors


class MemoryKind(StrEnum):
    """DRAM: host memory. VRAM: a GPU's."""

    DRAM = "dram"
    VRAM = "vram"


@dataclass(frozen=True, slots=True)
class MemorySpace:
    """Where addresses point to. device: the GPU's number as its own process counts; 0 for host memory."""

    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0


HOST = MemorySpace()


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Bytes that may be read from or written to, `[address, address + nbytes)`. The owner keeps them alive."""

    address: int
    nbytes: int
    space: MemorySpace = HOST


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """Bytes to copy to a peer, which is told when they are there. No descriptors: only tell it.

    source, destination: where the addresses of the two sides point to.
    """

    peer: str
    descriptors: Descriptors
    notification: bytes
    source: MemorySpace = HOST
    destination: MemorySpace = HOST


@dataclass(frozen=True, slots=True)
class WriteResult:
    """How a write ended. handle: what `write` returned. error: None if every byte and the notification were sent."""

    handle: int
    error: TransferError | None = None

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.error is None


class TransferBackend(Protocol):
    """One agent: its registered memory, its peers, the writes it has posted. Not thread-safe."""

    @property
    def name(self) -> str:
        """The agent's name, unique among all that it meets."""
        ...

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Allow reads and writes of `regions`; before `metadata` is taken. Raises TransferError if it cannot be."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to write here; opaque, valid for this process only."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Meet the agent that this metadata came from, and return its name; doing so again changes nothing.

        Raises PeerIncompatible if the bytes are no such metadata, or if a peer of that name is known with others: a
        restarted agent must have a new name, or the old one be removed first.
        """
        ...

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; its unfinished writes end as failed, with PeerLost. An unknown peer is no error."""
        ...

    def write(self, write: Write) -> int:
        """Copy bytes from here to a peer, then notify it, and return a handle for `poll`.

        Every source lies within one of our regions, every destination within one of the peer's. Never raises for what
        is wrong with the peer or with addresses: the result says so. May block while bytes are copied, without the GIL.
        """
        ...

    def poll(self) -> list[WriteResult]:
        """Writes that ended since the last call, each reported once. Also moves the others on."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification without data. Raises PeerLost if the peer is unknown or dead."""
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer, message) that arrived since the last call, in no promised order. Also moves things on."""
        ...

    def transport(self, peer: str) -> str:
        """What carries writes to a peer: "shm", "cuda_ipc", "tcp", ...; "unknown" until one that tells has ended."""
        ...

    def close(self) -> None:
        """Release everything; the backend cannot be used afterwards. Calling it twice is fine."""
        ...
