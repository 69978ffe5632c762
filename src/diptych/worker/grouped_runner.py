"""Runs one step of a data-parallel group, together with the other groups: each makes the same collectives.

So every planned row is computed, whatever has become of its sequence, and a group without rows computes a token for
nobody, in a slot and a page of its own. Worker's thread.
"""

from __future__ import annotations

import time

import torch

from diptych.attention.backend import AttentionBackend
from diptych.core.batch import Admission, Batch, RowOutput, SequenceStep, StepOutput
from diptych.core.request import SamplingParams
from diptych.errors import ConfigError
from diptych.layers.mlp import GatedMLP
from diptych.layers.moe import MoE
from diptych.layers.token_exchange import TokenExchange
from diptych.models.transformer import Transformer
from diptych.worker.inputs import build_inputs
from diptych.worker.rows import Rows
from diptych.worker.runner import FinishedStep, PendingStep
from diptych.worker.slots import SlotTable


class GroupedRunner:
    """A `Runner`. Args: rows: whose slot table has one slot more than are used. spare_page: one that nobody else uses.

    Raises: ConfigError for a model of which more than MLPs, mixtures and vocabulary is shared, or over stages.
    """

    def __init__(self, model: Transformer, attention: AttentionBackend, rows: Rows, *, spare_page: int) -> None:
        if model.device.type != "cpu":
            raise ConfigError("dp_size above 1 is not on CUDA yet; use more tp, or more engines and `diptych route`")
        self._model, self._attention, self._rows = model, attention, rows
        self._exchange = TokenExchange(model.groups.data)
        self._exchange.surround(model.embed_tokens)
        self._exchange.surround_head(model.lm_head)
        for layer in model.layers:
            (shared,) = [child for child in layer.children() if isinstance(child, GatedMLP | MoE)]
            self._exchange.surround(shared)
        self._idle_step = _idle_step(rows.slots, spare_page)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Compute one step. Raises: RankLost."""
        started = time.perf_counter()
        self._rows.update(batch)
        self._exchange.begin_step(batch.group_tokens, batch.group_rows)
        inputs = build_inputs(batch.steps or [self._idle_step], self._rows.slots, self._model.device)
        hidden = self._model.forward_logit_rows(inputs, self._attention)
        logits = self._model.logits(hidden) if max(batch.group_rows) else None
        rows = [] if logits is None or not batch.steps else self._sample(batch.steps, logits)
        outputs = rows or [self._rows.skipped(step.slot) for step in batch.steps]
        return FinishedStep(StepOutput(batch.step_id, outputs, time.perf_counter() - started))

    def _sample(self, steps: list[SequenceStep], logits: torch.Tensor) -> list[RowOutput]:
        """logits: of the rows that sample, in order."""
        sampling = [step.slot for step in steps if step.samples]
        kept = [index for index, slot in enumerate(sampling) if not self._rows.is_over(slot)]
        slots = [sampling[index] for index in kept]
        found: dict[int, RowOutput] = {}
        if slots:
            sampled = self._rows.sampler.sample(logits[kept], slots)
            for slot, token_id, logprobs, error in zip(
                slots, sampled.token_ids.tolist(), sampled.logprobs, sampled.errors, strict=True
            ):
                if error is None:
                    found[slot] = self._rows.accept(slot, token_id, logprobs)
                else:
                    found[slot] = self._rows.fail(slot, error)
        return [found.get(step.slot) or self._rows.skipped(step.slot) for step in steps]


def _idle_step(slots: SlotTable, page: int) -> SequenceStep:
    """A token of nobody, in the last slot."""
    slot = len(slots.num_tokens) - 1
    slots.admit(Admission(slot, "", [0], 1, SamplingParams(), (), 1))
    slots.append_pages(SequenceStep(slot, 0, 1, [page], True))
    return SequenceStep(slot, 0, 1, [], True)
