"""What admitted sequences hold on the worker: a slot and pages. Engine thread; never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.core.batch import Admission, SequenceStep
from diptych.core.sequence import Sequence
from diptych.errors import InvariantError
from diptych.kv.cache import KVCache, SequencePages


@dataclass(slots=True)
class Seat:
    """A worker slot, the sequence's pages, and how many of them the worker has been told."""

    slot: int
    pages: SequencePages
    num_pages_sent: int = 0


class Seats:
    """Slots and who sits in them. A vacated slot is reused at once: the worker applies releases before admissions."""

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        self._cache = cache
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: dict[Sequence, Seat] = {}
        self._releases: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, pages: SequencePages, eos_token_ids: tuple[int, ...]) -> Admission:
        """Seat a sequence with its pages; returns what the worker must be told."""
        slot = self._free.pop()
        self._taken[sequence] = Seat(slot, pages)
        sampling = sequence.request.sampling
        return Admission(
            slot,
            sequence.request_id,
            list(sequence.token_ids),
            sequence.num_prompt_tokens,
            sampling,
            () if sampling.ignore_eos else eos_token_ids,
            sequence.max_len - sequence.num_prompt_tokens,
        )

    def pages(self, sequence: Sequence) -> SequencePages:
        """Pages of a seated sequence."""
        return self._taken[sequence].pages

    def row(self, sequence: Sequence, count: int) -> SequenceStep:
        """The sequence's next `count` tokens as a row, with the pages that the worker has not been told yet."""
        seat = self._taken[sequence]
        start = sequence.num_computed_tokens
        new_pages = seat.pages.pages[seat.num_pages_sent :]
        seat.num_pages_sent += len(new_pages)
        return SequenceStep(seat.slot, start, count, new_pages, start + count == sequence.num_tokens)

    def vacate(self, sequence: Sequence) -> None:
        """Give back slot and pages; whole computed pages stay in the prefix cache. No step may be in flight."""
        self._cache.close(self.leave(sequence), sequence.token_ids, sequence.num_computed_tokens)

    def leave(self, sequence: Sequence) -> SequencePages:
        """Give back the slot alone, and return the pages to whom they now belong. No step may be in flight."""
        if sequence.num_inflight_steps:
            raise InvariantError(
                f"request {sequence.request_id} leaves with {sequence.num_inflight_steps} steps in flight"
            )
        seat = self._taken.pop(sequence)
        self._free.append(seat.slot)
        self._releases.append(seat.slot)
        return seat.pages

    def take_releases(self) -> list[int]:
        """Slots vacated since the last call."""
        releases, self._releases = self._releases, []
        return releases

    def check(self) -> None:
        """Raise InvariantError unless every slot is free or taken, once."""
        slots = sorted([*self._free, *(seat.slot for seat in self._taken.values())])
        if slots != list(range(self._num_slots)):
            raise InvariantError(
                f"slots do not add up: free {self._free}, taken {len(self._taken)} of {self._num_slots}"
            )
