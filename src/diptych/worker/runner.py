"""Runs one batch: slot updates, model, sampling. The only place that knows the order of a step. Worker's thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from diptych.attention.backend import AttentionBackend
from diptych.core.batch import Batch, RowOutput, SequenceStep, StepOutput, TokenLogprobs
from diptych.models.transformer import Transformer
from diptych.sampling.logprobs import prompt_logprobs
from diptych.worker.adapters import AdapterStore
from diptych.worker.inputs import build_inputs
from diptych.worker.rows import Rows
from diptych.worker.slots import SlotTable

# Logits of this many prompt positions are held at once: 64 x 262,144 floats are 64 MiB.
PROMPT_LOGITS_CHUNK = 64


class PendingStep(Protocol):
    """A batch that the device may still be computing."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Return when the device has computed it; on any thread."""
        ...

    def collect(self) -> StepOutput:
        """Its result, once it is done; on the worker's thread, in the order of launches."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A `PendingStep` that was computed as it was launched."""

    output: StepOutput
    is_done: bool = True

    def wait(self) -> None:
        return

    def collect(self) -> StepOutput:
        return self.output


class Runner(Protocol):
    """Runs batches, each launched in the order in which it was planned."""

    def launch(self, batch: Batch) -> PendingStep:
        """Apply the batch's changes to the slots and begin to compute its rows."""
        ...


class StepModel(Protocol):
    """A model as a synchronous step needs it."""

    def hidden(self, steps: list[SequenceStep], slots: SlotTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and int64 [R], where in them the last tokens of the rows that sample are.

        Of all these rows' tokens, [T, hidden], if a row wants the logprobs of its prompt; else there may be no others.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [R, vocab], of hidden states [R, hidden]; the caller may write to them."""
        ...

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Each row's likeliest token, int64 [R], and its logit, float32 [R], if they can be had without all logits."""
        ...


class TorchStepModel:
    """A `StepModel` of torch modules, on any device."""

    def __init__(
        self,
        model: Transformer,
        attention: AttentionBackend,
        device: torch.device,
        *,
        adapters: AdapterStore | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._attention = attention
        self._device = device

    def hidden(
        self, steps: list[SequenceStep], slots: SlotTable, *, wants_all: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepModel`; wants_all: of all tokens in any case."""
        inputs = build_inputs(steps, slots, self._device)
        if self._adapters is not None:
            self._adapters.begin_step(steps, slots)
        if wants_all or any(slots.occupant(step.slot).sampling.prompt_logprobs is not None for step in steps):
            return self._model(inputs, self._attention), inputs.logit_rows
        hidden = self._model.forward_logit_rows(inputs, self._attention)
        return hidden, torch.arange(hidden.shape[0], device=hidden.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._model.likeliest(hidden)


class ModelRunner:
    """Applies batches in order to slots, model and sampler of one rank."""

    def __init__(self, model: StepModel, rows: Rows) -> None:
        self._model = model
        self._rows = rows

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Compute one step. Rows of sequences that have ended in an earlier step are skipped and yield no token."""
        started = time.perf_counter()
        self._rows.update(batch)
        return FinishedStep(self.compute(batch, self._rows.live(batch.steps), started))

    def compute(self, batch: Batch, live: list[SequenceStep], started: float) -> StepOutput:
        """Compute the rows `live` of an updated batch, in any order, and skip its others."""
        outputs = {step.slot: row for step, row in zip(live, self._compute(live), strict=True)} if live else {}
        rows = [outputs.get(step.slot) or self._rows.skipped(step.slot) for step in batch.steps]
        return StepOutput(batch.step_id, rows, time.perf_counter() - started)

    def _compute(self, steps: list[SequenceStep]) -> list[RowOutput]:
        hidden, logit_rows = self._model.hidden(steps, self._rows.slots)
        sampled = iter(self._sample(steps, hidden[logit_rows]))
        rows, end = [], 0
        for step in steps:
            end += step.num_tokens
            row = next(sampled) if step.samples else RowOutput([])
            rows.append(self.with_prompt_logprobs(row, step, hidden, end))
        return rows

    def _sample(self, steps: list[SequenceStep], hidden: torch.Tensor) -> list[RowOutput]:
        """One output for each row that samples, in order. hidden: of their last tokens, [R, hidden]."""
        slots = [step.slot for step in steps if step.samples]
        if not slots:
            return []
        sampler = self._rows.sampler
        likeliest = self._model.likeliest(hidden) if sampler.is_greedy(slots) else None
        if likeliest is None:
            sampled = sampler.sample(self._model.logits(hidden), slots)
        else:
            sampled = sampler.take(*likeliest, slots)
        return [
            self._rows.accept(slot, token_id, logprobs) if error is None else self._rows.fail(slot, error)
            for slot, token_id, logprobs, error in zip(
                slots, sampled.token_ids.tolist(), sampled.logprobs, sampled.errors, strict=True
            )
        ]

    def with_prompt_logprobs(self, row: RowOutput, step: SequenceStep, hidden: torch.Tensor, end: int) -> RowOutput:
        """Add the logprobs of the prompt tokens that this chunk predicts, if they were asked for."""
        slots = self._rows.slots
        occupant = slots.occupant(step.slot)
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
            found += prompt_logprobs(logits, slots.token_ids[step.slot, position:stop].tolist(), sampling)
        return msgspec.structs.replace(row, prompt_logprobs=found)
