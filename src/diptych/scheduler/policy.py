"""Who goes first, and who makes room. Pure functions of sequences; a new policy is a function here.

Also the waiting queue, which keeps the order without sorting on every step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from diptych.core.sequence import Sequence
from diptych.scheduler.adapter_slots import AdapterSlots

PolicyKey = Callable[[Sequence], tuple[int, int]]


def first_come_first_served(sequence: Sequence) -> tuple[int, int]:
    """Order of arrival; a retracted sequence keeps its place, so it goes before later ones."""
    return (0, sequence.arrival_order)


def highest_priority(sequence: Sequence) -> tuple[int, int]:
    """Higher `Request.priority` first, then order of arrival."""
    return (-sequence.request.priority, sequence.arrival_order)


POLICIES: dict[str, PolicyKey] = {"fcfs": first_come_first_served, "priority": highest_priority}


def choose_victim(sequences: Iterable[Sequence], key: PolicyKey) -> Sequence | None:
    """The sequence to retract when pages run out: the one that would be served last."""
    return max(sequences, key=key, default=None)


class WaitingQueue:
    """Sequences in WAITING, in policy order. Removal is lazy: an entry whose sequence left is skipped.

    Sequences whose adapter has no slot stand aside until one may have come free, so that they block nobody.
    """

    def __init__(self, key: PolicyKey, adapters: AdapterSlots | None = None) -> None:
        self._key = key
        self._adapters = adapters or AdapterSlots()
        self._aside: list[Sequence] = []
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []
        self._members: set[Sequence] = set()
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        self._members.add(sequence)
        self._stand_in_line(sequence)

    def peek(self) -> Sequence | None:
        """The next sequence to serve, left in place."""
        if self._aside and self._adapters.take_news():
            aside, self._aside = self._aside, []
            for sequence in aside:
                if sequence in self._members:
                    self._stand_in_line(sequence)
        while self._heap:
            place, _, sequence = self._heap[0]
            if sequence not in self._members:
                heapq.heappop(self._heap)
            elif not self._adapters.may_run(sequence.request.adapter_id, place):
                heapq.heappop(self._heap)
                self._aside.append(sequence)
            else:
                return sequence
        return None

    def pop(self) -> Sequence:
        """Remove and return the next sequence. Raises IndexError when empty."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty WaitingQueue")
        heapq.heappop(self._heap)
        self._members.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands."""
        self._members.remove(sequence)
        if sequence in self._aside:
            self._aside.remove(sequence)
            self._adapters.drop_claim()

    def _stand_in_line(self, sequence: Sequence) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (self._key(sequence), self._pushes, sequence))
