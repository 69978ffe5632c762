"""Runs batches whose rows verify guesses: a decode row becomes its last token and the guesses after it.

Owns the order of such a step: guess, compute all of it as one ragged step, draw. What is not drawn leaves no trace but
keys and values beyond the sequence's end, which the next step overwrites. Worker's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import torch

from diptych.core.batch import Batch, RowOutput, SequenceStep, StepOutput
from diptych.speculative.drafter import Drafter, DraftRow
from diptych.speculative.verify import Choose, Verified, verify
from diptych.worker.rows import Rows
from diptych.worker.runner import FinishedStep, ModelRunner, PendingStep, TorchStepModel

MAX_LOGITS_NUMEL = 2**26
"""Logits that are computed for all rows at once; where there are more, those that each token needs."""


class SpeculativeRunner:
    """A `Runner` with a drafter."""

    def __init__(self, model: TorchStepModel, rows: Rows, drafter: Drafter, *, vocab_size: int) -> None:
        self._model = model
        self._rows = rows
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._plain = ModelRunner(model, rows)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Compute one step."""
        started = time.perf_counter()
        self._rows.update(batch)
        live = self._rows.live(batch.steps)
        self._admit(batch)
        drafts = self._guess(live)
        outputs = self._compute(live, drafts) if live else {}
        rows = [outputs.get(step.slot) or self._rows.skipped(step.slot) for step in batch.steps]
        return FinishedStep(StepOutput(batch.step_id, rows, time.perf_counter() - started))

    def _admit(self, batch: Batch) -> None:
        """Tell the drafter of new sequences; what is before a sequence's first row is cached, or came from a peer."""
        starts = {step.slot: step.start for step in batch.steps} if batch.admissions else {}
        for admission in batch.admissions:
            self._drafter.admit(admission.slot, starts.get(admission.slot, 0))

    def _is_known_text(self, step: SequenceStep) -> bool:
        """Whether the row computes a prompt, or an output again, rather than the token sampled last."""
        return (
            step.num_tokens - step.max_drafts > 1 or step.start < self._rows.slots.occupant(step.slot).num_prompt_tokens
        )

    def _guess(self, steps: list[SequenceStep]) -> dict[int, list[int]]:
        """Guesses by slot, written behind the known tokens, where the step reads them."""
        asked = [DraftRow(step.slot, step.max_drafts) for step in steps if step.max_drafts]
        if not asked:
            return {}
        drafts = {row.slot: guesses for row, guesses in zip(asked, self._drafter.propose(asked), strict=True)}
        for slot, guesses in drafts.items():
            self._rows.slots.write_drafts(slot, guesses)
        return drafts

    def _compute(self, steps: list[SequenceStep], drafts: dict[int, list[int]]) -> dict[int, RowOutput]:
        """Results by slot."""
        steps = [_as_drafted(step, len(drafts.get(step.slot, ()))) for step in steps]
        hidden, logit_rows = self._model.hidden(steps, self._rows.slots, wants_all=self._drafter.needs_hidden)
        sampled = self._draw(hidden[logit_rows], [step.slot for step in steps if step.samples], drafts)
        rows, end = {}, 0
        for step in steps:
            end += step.num_tokens
            row = self._row(step, next(sampled)) if step.samples else RowOutput([])
            rows[step.slot] = self._plain.with_prompt_logprobs(row, step, hidden, end)
        self._follow(steps, rows, hidden)
        return rows

    def _follow(self, steps: list[SequenceStep], rows: dict[int, RowOutput], hidden: torch.Tensor) -> None:
        """Show the drafter what the target has computed: all that is right and its hidden states, or prompts."""
        if not self._drafter.needs_hidden:
            known = [step for step in steps if self._is_known_text(step)]
            if known:
                self._drafter.follow(known, None)
            return
        followed: list[SequenceStep] = []
        indices: list[int] = []
        first = 0
        for step in steps:
            num_right = max(0, len(rows[step.slot].token_ids) - 1)
            count = step.num_tokens - step.max_drafts + num_right
            if not self._rows.is_over(step.slot):
                followed.append(msgspec.structs.replace(step, num_tokens=count, max_drafts=0))
                indices += range(first, first + count)
            first += step.num_tokens
        if followed:
            self._drafter.follow(followed, hidden[indices])

    def _draw(self, hidden: torch.Tensor, slots: list[int], drafts: dict[int, list[int]]) -> Iterator[Verified]:
        return iter(verify(self._choose(hidden, slots), slots, [drafts.get(slot, []) for slot in slots], self._take))

    def _choose(self, hidden: torch.Tensor, slots: list[int]) -> Choose:
        """How tokens are drawn. hidden: of all tokens whose logits are wanted, [R, hidden]."""
        sampler, model = self._rows.sampler, self._model
        likeliest = model.likeliest(hidden) if sampler.is_greedy(slots) else None
        if likeliest is not None:
            token_ids, values = likeliest
            return lambda index, going: sampler.take(token_ids[index], values[index], going)
        if hidden.shape[0] * self._vocab_size > MAX_LOGITS_NUMEL:
            return lambda index, going: sampler.sample(model.logits(hidden[index]), going)
        logits = model.logits(hidden)
        return lambda index, going: sampler.sample(logits[index], going)

    def _take(self, slot: int, token_id: int) -> bool:
        self._rows.accept(slot, token_id)
        return self._rows.is_over(slot)

    def _row(self, step: SequenceStep, verified: Verified) -> RowOutput:
        if verified.error is not None:
            return self._rows.fail(step.slot, verified.error)
        return RowOutput(verified.token_ids, verified.logprobs, num_drafts=step.max_drafts)


def _as_drafted(step: SequenceStep, num_drafts: int) -> SequenceStep:
    """The step as it is computed: its tokens, and the guesses that there are."""
    if step.max_drafts == num_drafts == 0:
        return step
    return msgspec.structs.replace(step, num_tokens=step.num_tokens + num_drafts, max_drafts=num_drafts)
