"""Runs one batch: slot updates, model, sampling. The only place that knows the order of a step. Worker's thread."""

from __future__ import annotations

import time

import torch

from diptych.attention.backend import AttentionBackend, ForwardInputs
from diptych.core.batch import Batch, RowOutput, SequenceStep, StepOutput, TokenLogprobs
from diptych.errors import DiptychError
from diptych.models.transformer import Transformer
from diptych.sampling.logprobs import prompt_logprobs
from diptych.sampling.sampler import Sampler
from diptych.worker.inputs import build_inputs
from diptych.worker.slots import SlotTable

# Logits of this many prompt positions are held at once: 64 x 262,144 floats are 64 MiB.
PROMPT_LOGITS_CHUNK = 64


class ModelRunner:
    """Applies batches in order to slots, model and sampler of one rank."""

    def __init__(
        self,
        model: Transformer,
        attention: AttentionBackend,
        *,
        sampler: Sampler,
        slots: SlotTable,
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._slots = slots
        self._device = device
        self._errors: dict[int, str] = {}  # by slot: why its sequence cannot be sampled

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Compute one step. Rows of sequences that have ended in an earlier step are skipped and yield no token."""
        started = time.perf_counter()
        self._update_slots(batch)
        live = [step for step in batch.steps if not self._is_over(step.slot)]
        outputs = dict(zip((id(step) for step in live), self._compute(live), strict=True)) if live else {}
        rows = [outputs.get(id(step)) or self._skipped(step.slot) for step in batch.steps]
        return StepOutput(batch.step_id, rows, time.perf_counter() - started)

    def _update_slots(self, batch: Batch) -> None:
        for slot in batch.releases:
            self._slots.release(slot)
            self._sampler.release(slot)
            self._errors.pop(slot, None)
        for admission in batch.admissions:
            self._slots.admit(admission)
            try:
                self._sampler.admit(
                    admission.slot,
                    admission.sampling,
                    admission.token_ids,
                    admission.num_prompt_tokens,
                    admission.eos_token_ids,
                )
            except DiptychError as error:  # a grammar that does not compile ends its own request only
                self._errors[admission.slot] = str(error)
        for step in batch.steps:
            self._slots.append_pages(step)

    def _is_over(self, slot: int) -> bool:
        return slot in self._errors or self._slots.occupant(slot).has_ended

    def _skipped(self, slot: int) -> RowOutput:
        return RowOutput([], error=self._errors.get(slot))

    def _compute(self, steps: list[SequenceStep]) -> list[RowOutput]:
        inputs = build_inputs(steps, self._slots, self._device)
        hidden = self._model(inputs, self._attention)
        sampled = iter(self._sample(steps, inputs, hidden))
        return [
            self._with_prompt_logprobs(next(sampled) if step.samples else RowOutput([]), step, hidden, end)
            for step, end in zip(steps, self._row_ends(steps), strict=True)
        ]

    def _row_ends(self, steps: list[SequenceStep]) -> list[int]:
        ends, end = [], 0
        for step in steps:
            end += step.num_tokens
            ends.append(end)
        return ends

    def _sample(self, steps: list[SequenceStep], inputs: ForwardInputs, hidden: torch.Tensor) -> list[RowOutput]:
        """One output for each row that samples, in order."""
        slots = [step.slot for step in steps if step.samples]
        if not slots:
            return []
        sampled = self._sampler.sample(self._model.logits(hidden[inputs.logit_rows]), slots)
        rows = []
        for slot, token_id, logprobs, error in zip(
            slots, sampled.token_ids.tolist(), sampled.logprobs, sampled.errors, strict=True
        ):
            if error is not None:
                self._errors[slot] = error
                rows.append(self._skipped(slot))
                continue
            self._slots.append_token(slot, token_id)
            rows.append(RowOutput([token_id], [] if logprobs is None else [logprobs]))
        return rows

    def _with_prompt_logprobs(self, row: RowOutput, step: SequenceStep, hidden: torch.Tensor, end: int) -> RowOutput:
        """Add the logprobs of the prompt tokens that this chunk predicts, if they were asked for."""
        occupant = self._slots.occupant(step.slot)
        sampling = occupant.sampling
        if sampling.prompt_logprobs is None:
            return row
        first = max(step.start + 1, sampling.prompt_logprobs_start, 1)
        last = min(step.start + step.num_tokens + 1, occupant.num_prompt_tokens)  # exclusive
        found: list[TokenLogprobs] = []
        for position in range(first, last, PROMPT_LOGITS_CHUNK):
            stop = min(position + PROMPT_LOGITS_CHUNK, last)
            row_of_start = end - step.num_tokens - step.start - 1
            logits = self._model.logits(hidden[row_of_start + position : row_of_start + stop])
            found += prompt_logprobs(logits, self._slots.token_ids[step.slot, position:stop].tolist(), sampling)
        return RowOutput(row.token_ids, row.logprobs, found, row.error)
