"""The worker's memory of admitted sequences: one row a slot, so that a decode costs a few integers on the wire.

Holds token ids and pages in numpy tables that `inputs` reads without a loop over rows. Knows nothing of scheduling.
Worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diptych.core.batch import NO_ADAPTER, Admission, SequenceStep
from diptych.core.request import SamplingParams


@dataclass(slots=True)
class Occupant:
    """One admitted sequence. stop_token_ids: those that end it, EOS included; has_ended: one of them was sampled.
    adapter_slot: as in Admission.
    """

    sampling: SamplingParams
    num_prompt_tokens: int
    num_pages: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    has_ended: bool = False
    adapter_slot: int = NO_ADAPTER


class SlotTable:
    """Tokens and pages by slot.

    token_ids: int32 [num_slots, max_model_len + 1]. num_tokens: int64 [num_slots], how many of them are known. pages:
    int32 [num_slots, max pages]. Tokens and pages are touched lazily, so unused length costs no memory.
    """

    def __init__(self, num_slots: int, max_model_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.token_ids = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self.pages = np.zeros((num_slots, -(-max_model_len // page_size)), dtype=np.int32)
        self._occupants: list[Occupant | None] = [None] * num_slots
        self._num_adapted = 0

    def admit(self, admission: Admission) -> None:
        """Bind a sequence to its slot."""
        num_tokens = len(admission.token_ids)
        self.token_ids[admission.slot, :num_tokens] = admission.token_ids
        self.num_tokens[admission.slot] = num_tokens
        self._occupants[admission.slot] = Occupant(
            sampling=admission.sampling,
            num_prompt_tokens=admission.num_prompt_tokens,
            num_pages=0,
            max_num_tokens=admission.num_prompt_tokens + admission.max_tokens,
            stop_token_ids=frozenset(admission.eos_token_ids) | frozenset(admission.sampling.stop_token_ids),
            adapter_slot=admission.adapter_slot,
        )
        self._num_adapted += admission.adapter_slot != NO_ADAPTER

    def release(self, slot: int) -> None:
        """Free a slot for the next admission."""
        self._num_adapted -= self.occupant(slot).adapter_slot != NO_ADAPTER
        self._occupants[slot] = None

    @property
    def has_adapters(self) -> bool:
        """Whether any sequence is under an adapter."""
        return self._num_adapted > 0

    def occupant(self, slot: int) -> Occupant:
        """The sequence in an occupied slot."""
        occupant = self._occupants[slot]
        assert occupant is not None, f"slot {slot} is empty"
        return occupant

    def append_pages(self, step: SequenceStep) -> None:
        """Take over the pages that a row brings."""
        if step.new_pages:
            occupant = self.occupant(step.slot)
            end = occupant.num_pages + len(step.new_pages)
            self.pages[step.slot, occupant.num_pages : end] = step.new_pages
            occupant.num_pages = end

    def write_drafts(self, slot: int, token_ids: list[int]) -> None:
        """Put guesses behind the known tokens, as inputs of this step alone."""
        num_tokens = int(self.num_tokens[slot])
        self.token_ids[slot, num_tokens : num_tokens + len(token_ids)] = token_ids

    def append_token(self, slot: int, token_id: int) -> None:
        """Remember a sampled token; it is the next step's input, unless it ends the sequence."""
        occupant = self.occupant(slot)
        num_tokens = int(self.num_tokens[slot]) + 1
        self.token_ids[slot, num_tokens - 1] = token_id
        self.num_tokens[slot] = num_tokens
        num_output_tokens = num_tokens - occupant.num_prompt_tokens
        occupant.has_ended = num_tokens >= occupant.max_num_tokens or (
            token_id in occupant.stop_token_ids and num_output_tokens >= occupant.sampling.min_tokens
        )
