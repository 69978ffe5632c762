"""What admitted sequences hold on the worker: a slot and pages. Engine thread; never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.core.batch import AdapterPlacement, Admission, ConfirmedTokens, SequenceStep
from diptych.core.sequence import Sequence
from diptych.errors import InvariantError
from diptych.kv.cache import KVCache, SequencePages
from diptych.scheduler.adapter_slots import AdapterSlots


@dataclass(slots=True)
class Seat:
    """A worker slot, the sequence's pages, and how many of those and of its tokens the worker has been told."""

    slot: int
    pages: SequencePages
    num_tokens_sent: int
    num_pages_sent: int = 0


class Seats:
    """Slots and who sits in them. A vacated slot is reused at once: the worker applies releases before admissions.

    Args: tells_tokens: whether workers must be told the tokens that rows compute; else they sampled them themselves.
    """

    def __init__(
        self, cache: KVCache, num_slots: int, *, tells_tokens: bool = False, adapters: AdapterSlots | None = None
    ) -> None:
        self._cache = cache
        self._adapters = adapters or AdapterSlots()
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: dict[Sequence, Seat] = {}
        self._releases: list[int] = []
        self._tells_tokens = tells_tokens
        self._tokens: list[ConfirmedTokens] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, pages: SequencePages, eos_token_ids: tuple[int, ...]) -> Admission:
        """Seat a sequence with its pages; returns what the worker must be told."""
        slot = self._free.pop()
        self._taken[sequence] = Seat(slot, pages, len(sequence.token_ids))
        sampling = sequence.request.sampling
        return Admission(
            slot,
            sequence.request_id,
            list(sequence.token_ids),
            sequence.num_prompt_tokens,
            sampling,
            () if sampling.ignore_eos else eos_token_ids,
            sequence.max_len - sequence.num_prompt_tokens,
            self._adapters.take(sequence.request.adapter_id),
        )

    def pages(self, sequence: Sequence) -> SequencePages:
        """Pages of a seated sequence."""
        return self._taken[sequence].pages

    def row(self, sequence: Sequence, count: int, max_drafts: int = 0) -> SequenceStep:
        """The sequence's next `count` tokens as a row, with the pages that the worker has not been told yet."""
        seat = self._taken[sequence]
        start = sequence.num_computed_tokens
        new_pages = seat.pages.pages[seat.num_pages_sent :]
        seat.num_pages_sent += len(new_pages)
        if self._tells_tokens and start + count > seat.num_tokens_sent:
            self._tokens.append(ConfirmedTokens(seat.slot, sequence.token_ids[seat.num_tokens_sent : start + count]))
            seat.num_tokens_sent = start + count
        return SequenceStep(seat.slot, start, count, new_pages, start + count == sequence.num_tokens, max_drafts)

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
        self._adapters.give_back(sequence.request.adapter_id)
        self._free.append(seat.slot)
        self._releases.append(seat.slot)
        return seat.pages

    def take_releases(self) -> list[int]:
        """Slots vacated since the last call."""
        releases, self._releases = self._releases, []
        return releases

    def take_tokens(self) -> list[ConfirmedTokens]:
        """Tokens of the rows made since the last call that the worker has not been told yet."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def take_placements(self) -> list[AdapterPlacement]:
        """Adapters that must move before what has been seated since the last call is computed."""
        return self._adapters.take_placements()

    def check(self, *, is_idle: bool) -> None:
        """Raise InvariantError unless every slot is free or taken, once, and adapters are where they are used; when
        idle, if a slot or a page that is not quarantined is held.
        """
        num_held = self._cache.num_owned - self._cache.num_taken_out
        if is_idle and (num_held or self._taken):
            raise InvariantError(
                f"idle, but {num_held} pages are owned, and of {self._num_slots} slots {self.num_free} are free"
            )
        self._adapters.check([sequence.request.adapter_id for sequence in self._taken])
        slots = sorted([*self._free, *(seat.slot for seat in self._taken.values())])
        if slots != list(range(self._num_slots)):
            raise InvariantError(
                f"slots do not add up: free {self._free}, taken {len(self._taken)} of {self._num_slots}"
            )
