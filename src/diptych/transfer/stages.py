"""When a room reached each of its stages, and the one log line about it at its end. Plain data, without a clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    """What a room reaches once, on either side. The value names it in the log."""

    MET = "room_wait"
    FIRST_TOKEN = "first_token"
    FIRST_WRITE = "first_write"


@dataclass(slots=True)
class Stages:
    """One room's. reached: monotonic seconds; nbytes, num_descriptors, write_s: sums over its finished writes.

    queue_s: what the request waited before the room was opened.
    """

    opened: float
    queue_s: float | None = None
    reached: dict[Stage, float] = field(default_factory=dict)
    nbytes: int = 0
    num_descriptors: int = 0
    write_s: float = 0.0

    def reach(self, stage: Stage, now: float) -> None:
        """Note the first time."""
        self.reached.setdefault(stage, now)

    def add_write(self, nbytes: int, num_descriptors: int, seconds: float) -> None:
        """Note a write that has ended well."""
        self.nbytes += nbytes
        self.num_descriptors += num_descriptors
        self.write_s += seconds

    def line(self, room: int, outcome: str, now: float) -> str:
        """`room=... outcome=...`, then what is known: milliseconds since the room was opened; transfer_ms since its
        first write.
        """
        times = {f"{stage.value}_ms": at - self.opened for stage, at in self.reached.items()}
        if self.queue_s is not None:
            times = {"queue_ms": self.queue_s, **times}
        first_write = self.reached.get(Stage.FIRST_WRITE)
        if first_write is not None:
            times["transfer_ms"] = now - first_write
        times["total_ms"] = now - self.opened
        parts = [f"room={room}", f"outcome={outcome}", *(f"{name}={1e3 * s:.1f}" for name, s in times.items())]
        if self.nbytes:
            parts += [f"bytes={self.nbytes}", f"descriptors={self.num_descriptors}"]
        if self.write_s:
            parts.append(f"gb_s={self.nbytes / self.write_s / 1e9:.3g}")
        return " ".join(parts)
