"""Per-request deadlines: a heap, so that a step costs nothing when none has passed."""

from __future__ import annotations

import heapq

from diptych.core.sequence import Sequence


class Deadlines:
    """Sequences ordered by the time at which they expire (seconds since the epoch)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def add(self, sequence: Sequence, deadline: float) -> None:
        """Watch a sequence until it is answered."""
        heapq.heappush(self._heap, (deadline, sequence.arrival_order, sequence))

    def expired(self, now: float) -> list[Sequence]:
        """Unanswered sequences whose deadline has passed; each is returned once."""
        sequences: list[Sequence] = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_answered):
            sequence = heapq.heappop(self._heap)[2]
            if not sequence.is_answered:
                sequences.append(sequence)
        return sequences

    def next_deadline(self) -> float | None:
        """When the earliest one expires."""
        return self._heap[0][0] if self._heap else None
