"""What becomes of the rows of a step: who sits in which slot, whose sequence is over, and the tokens they get.

Owns the slot table's and the sampler's changes, in the order of batches. Knows no model. Worker's thread.
"""

from __future__ import annotations

from diptych.core.batch import Batch, RowOutput, SequenceStep, TokenLogprobs
from diptych.errors import DiptychError
from diptych.sampling.sampler import Sampler
from diptych.worker.slots import SlotTable


class Rows:
    """Slots and sampler of one rank, and why a slot's sequence cannot be sampled, if it cannot."""

    def __init__(self, slots: SlotTable, sampler: Sampler) -> None:
        self.slots = slots
        self.sampler = sampler
        self._errors: dict[int, str] = {}

    def update(self, batch: Batch) -> None:
        """Apply a batch's releases, admissions and new pages."""
        for slot in batch.releases:
            self.slots.release(slot)
            self.sampler.release(slot)
            self._errors.pop(slot, None)
        for admission in batch.admissions:
            self.slots.admit(admission)
            try:
                self.sampler.admit(
                    admission.slot,
                    admission.sampling,
                    admission.token_ids,
                    admission.num_prompt_tokens,
                    admission.eos_token_ids,
                )
            except DiptychError as error:  # a grammar that does not compile ends its own request only
                self._errors[admission.slot] = str(error)
        for step in batch.steps:
            self.slots.append_pages(step)

    def live(self, steps: list[SequenceStep]) -> list[SequenceStep]:
        """The rows whose sequences have not ended, as far as is known; those of each adapter are adjacent."""
        rows = [step for step in steps if not self.is_over(step.slot)]
        if self.slots.has_adapters:
            rows.sort(key=lambda step: self.slots.occupant(step.slot).adapter_slot)
        return rows

    def is_over(self, slot: int) -> bool:
        """Whether nothing more is computed for a slot's sequence."""
        return slot in self._errors or self.slots.occupant(slot).has_ended

    def skipped(self, slot: int) -> RowOutput:
        """The result of a row that is not computed."""
        return RowOutput([], error=self._errors.get(slot))

    def fail(self, slot: int, error: str) -> RowOutput:
        """End a slot's sequence with an error."""
        self._errors[slot] = error
        return self.skipped(slot)

    def accept(self, slot: int, token_id: int, logprobs: TokenLogprobs | None = None) -> RowOutput:
        """Append a sampled token."""
        self.slots.append_token(slot, token_id)
        return RowOutput([token_id], [] if logprobs is None else [logprobs])
