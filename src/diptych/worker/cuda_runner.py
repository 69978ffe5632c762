"""Runs batches on a CUDA device without waiting for it: a step is launched before the last one's tokens are known here.

Owns what is in flight. The last token of every slot stays on the device, where the next step reads it; tokens reach the
host when a step is collected. Steps whose sampling needs the host (grammar, penalties, logprobs) are computed at once.
Worker's thread, except `CudaStepInFlight.wait`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from diptych.attention.backend import AttentionBackend
from diptych.attention.flashinfer import DecodeRows, FlashInferAttention, PrefillRows, StepAttention
from diptych.core.batch import Batch, RowOutput, SequenceStep, StepOutput
from diptych.kernels.cuda.sampling import argmax_rows, new_workspace, store_last
from diptych.models.cuda_transformer import CudaStep, CudaTransformer
from diptych.models.transformer import Transformer
from diptych.sampling.sampler import UNSOUND
from diptych.worker.cuda_graph import NUMBERS, DecodeGraphs, DecodeNumbers, GraphOutput
from diptych.worker.cuda_inputs import DevicePages, PinnedRing, RaggedNumbers, decode_numbers, ragged_numbers
from diptych.worker.rows import Rows
from diptych.worker.runner import FinishedStep, ModelRunner, PendingStep
from diptych.worker.slots import SlotTable

RING_DEPTH = 8
"""Pinned buffers: two uploads a step, and up to four steps in flight."""


class CudaStepInFlight:
    """A `PendingStep` on the device. token_ids: int64 [R], pinned, valid once `event` has passed; one for each of the
    rows `live` that samples, in their order.
    """

    def __init__(
        self, batch: Batch, live: list[SequenceStep], token_ids: torch.Tensor, *, rows: Rows, started: float
    ) -> None:
        self._batch = batch
        self._live = live
        self._token_ids = token_ids
        self._rows = rows
        self._started = started
        self._output: StepOutput | None = None
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    @property
    def is_done(self) -> bool:
        return self._output is not None or self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def collect(self) -> StepOutput:
        if self._output is None:
            token_ids = iter(self._token_ids.tolist())
            outputs = {
                step.slot: self._row(step.slot, next(token_ids)) if step.samples else RowOutput([])
                for step in self._live
            }
            rows = [outputs.get(step.slot) or self._rows.skipped(step.slot) for step in self._batch.steps]
            self._output = StepOutput(self._batch.step_id, rows, time.perf_counter() - self._started)
        return self._output

    def _row(self, slot: int, token_id: int) -> RowOutput:
        """The step before this one may have ended the sequence, unknown when this one was launched."""
        if self._rows.is_over(slot):
            return self._rows.skipped(slot)
        return self._rows.fail(slot, UNSOUND) if token_id < 0 else self._rows.accept(slot, token_id)


class CudaRunner:
    """Launches batches in order.

    Args: last_tokens: int64 [slots], the device's own memory of what it sampled, which `transformer` reads.
    """

    def __init__(
        self,
        transformer: CudaTransformer,
        attention: FlashInferAttention,
        *,
        rows: Rows,
        last_tokens: torch.Tensor,
        vocab_size: int,
    ) -> None:
        self._transformer = transformer
        self._attention = attention
        self._rows = rows
        self._last_tokens = last_tokens
        self._device = last_tokens.device
        max_rows = len(last_tokens)
        self._workspace = new_workspace(max_rows, vocab_size, device=self._device)
        self._ring = PinnedRing(RING_DEPTH, len(NUMBERS) * max_rows)
        self._pages = DevicePages(rows.slots, self._device)
        self._graphs = DecodeGraphs(max_rows, self._decode, device=self._device)
        self._synchronous = ModelRunner(self, rows)
        self._in_flight: deque[CudaStepInFlight] = deque()

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the decode graphs; nothing may be in flight."""
        with torch.inference_mode():
            self._graphs.capture(progress)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue one step on the device. Rows of sequences known to have ended yield no token."""
        started = time.perf_counter()
        self._rows.update(batch)
        self._pages.append(batch.steps, self._ring)
        if self._needs_host(batch):
            self._settle()
            return FinishedStep(self._synchronous.compute(batch, self._ordered(batch), started))
        live = self._ordered(batch)
        token_ids = self._compute(live) if live else torch.empty(0, dtype=torch.int64)
        step = CudaStepInFlight(batch, live, token_ids, rows=self._rows, started=started)
        self._forget_collected()
        self._in_flight.append(step)
        return step

    def hidden(self, steps: list[SequenceStep], slots: SlotTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a synchronous step; see `StepModel`."""
        numbers = self._ragged(steps)
        return self._transformer.forward(self._ragged_step(numbers, wants_all=True)), numbers.logit_rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of a synchronous step; see `StepModel`."""
        return self._transformer.logits(hidden).float()

    def likeliest(self, hidden: torch.Tensor) -> None:
        """Of a synchronous step; see `StepModel`: greedy batches are not computed here."""

    def _needs_host(self, batch: Batch) -> bool:
        slots = self._rows.slots
        return self._rows.sampler.needs_host([step.slot for step in batch.steps if step.samples]) or any(
            slots.occupant(step.slot).sampling.prompt_logprobs is not None for step in batch.steps
        )

    def _settle(self) -> None:
        """Take over every token that is still on its way."""
        for step in self._in_flight:
            step.wait()
            step.collect()
        self._in_flight.clear()

    def _forget_collected(self) -> None:
        while self._in_flight and self._in_flight[0].is_done:
            self._in_flight.popleft()

    def _ordered(self, batch: Batch) -> list[SequenceStep]:
        """Live rows, single tokens first."""
        return sorted(self._rows.live(batch.steps), key=lambda step: step.num_tokens > 1)

    def _compute(self, steps: list[SequenceStep]) -> torch.Tensor:
        """Launch model and sampling; the tokens of the rows that sample, on their way to pinned memory."""
        slots = [step.slot for step in steps if step.samples]
        size = self._graphs.size_for(len(steps)) if steps[-1].num_tokens == 1 and len(slots) == len(steps) else None
        if size is not None:
            output = self._replay(steps, size)
            logits, store_slots = output.logits[: len(slots)], output.store_slots[: len(slots)]
            token_ids = self._chosen(logits, store_slots, slots, likeliest=output.token_ids[: len(slots)])
        else:
            numbers = self._ragged(steps)
            hidden = self._transformer.forward(self._ragged_step(numbers))
            if not slots:
                return torch.empty(0, dtype=torch.int64)
            token_ids = self._chosen(self._transformer.logits(hidden), numbers.store_slots, slots)
        return token_ids.to("cpu", non_blocking=True)

    def _chosen(
        self,
        logits: torch.Tensor,
        store_slots: torch.Tensor,
        slots: list[int],
        *,
        likeliest: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rows' tokens, stored. likeliest: those of greedy rows, if they are known and stored already."""
        sampler = self._rows.sampler
        if sampler.is_greedy(slots):
            sampler.advance(slots)
            return self._argmax(logits, store_slots) if likeliest is None else likeliest
        token_ids = sampler.sample_device(logits, slots)
        store_last(token_ids, store_slots, last_tokens=self._last_tokens)
        return token_ids

    def _argmax(self, logits: torch.Tensor, store_slots: torch.Tensor) -> torch.Tensor:
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=self._device)
        argmax_rows(logits, out=token_ids, workspace=self._workspace)
        store_last(token_ids, store_slots, last_tokens=self._last_tokens)
        return token_ids

    def _replay(self, steps: list[SequenceStep], size: int) -> GraphOutput:
        buffer, event = self._ring.take(len(NUMBERS) * size)
        numbers = buffer.view(len(NUMBERS), size)
        decode_numbers(steps, self._rows.slots, numbers.numpy())
        output = self._graphs.run(numbers)
        event.record()
        return output

    def _decode(self, numbers: DecodeNumbers) -> GraphOutput:
        """A decode step without anything that a graph cannot hold."""
        decodes = DecodeRows(
            table=self._pages.table,
            rows=numbers["rows"].to(torch.int32),
            kv_lens=numbers["kv_lens"].to(torch.int32),
        )
        step = CudaStep(
            token_ids=numbers["token_ids"],
            positions=numbers["positions"],
            kv_slots=numbers["kv_slots"],
            logit_rows=None,
            attend=StepAttention(self._attention, decodes, None),
        )
        logits = self._transformer.logits(self._transformer.forward(step))
        return GraphOutput(logits, self._argmax(logits, numbers["store_slots"]), numbers["store_slots"])

    def _ragged(self, steps: list[SequenceStep]) -> RaggedNumbers:
        num_decodes = sum(step.num_tokens == 1 for step in steps)
        return ragged_numbers(steps, num_decodes, self._rows.slots, ring=self._ring, device=self._device)

    def _ragged_step(self, numbers: RaggedNumbers, *, wants_all: bool = False) -> CudaStep:
        decodes = prefills = None
        if len(numbers.kv_lens):
            decodes = DecodeRows(table=self._pages.table, rows=numbers.rows, kv_lens=numbers.kv_lens)
        if len(numbers.kv_lens_host):
            prefills = PrefillRows(
                query_lens=numbers.query_lens_host, kv_lens=numbers.kv_lens_host, pages=numbers.pages
            )
        return CudaStep(
            token_ids=numbers.token_ids,
            positions=numbers.positions,
            kv_slots=numbers.kv_slots,
            logit_rows=None if wants_all else numbers.logit_rows,
            attend=StepAttention(self._attention, decodes, prefills),
        )


def create_cuda_runner(
    model: Transformer, attention: AttentionBackend, rows: Rows, capture: Callable[[int, int], None] | None
) -> CudaRunner | None:
    """A runner for a model on a CUDA device; None if `attention` or the model's layers are not those that it needs.

    Args: capture: told how far the decode graphs are, done and all; None captures none.
    """
    if not isinstance(attention, FlashInferAttention) or model.layer_blocks is None:
        return None
    pool = attention.pool
    if model.config.experts is not None and pool.tensor.dtype != torch.bfloat16:
        return None  # only the grouped GEMM leaves the host out of the choice of experts
    last_tokens = torch.zeros(len(rows.slots.pages), dtype=torch.int64, device=pool.tensor.device)
    transformer = CudaTransformer(model, pool, last_tokens)
    runner = CudaRunner(transformer, attention, rows=rows, last_tokens=last_tokens, vocab_size=model.config.vocab_size)
    if capture is not None:
        rows.sampler.warm_up(pool.tensor.dtype)
        runner.capture(capture)
    return runner
