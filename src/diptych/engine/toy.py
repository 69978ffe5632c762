"""A worker without weights: a toy model over real pages, for tests of scheduling and transfer.

Its keys are token ids and its values positions, written to the page that the batch names. A token is sampled from a
hash of what the pages hold, so a page lost, shared wrongly, reused too early or never written changes the output. Never
imports torch.
"""

from __future__ import annotations

import zlib
from array import array

import msgspec
import numpy as np

from diptych.core.batch import Admission, Batch, RowOutput, SequenceStep, StepOutput
from diptych.core.messages import EngineInfo
from diptych.core.request import Request
from diptych.engine.executor import PolledExecutor


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The toy model: greedy continuation of a text."""
    return zlib.crc32(array("i", token_ids).tobytes()) % vocab_size


def expected_output(request: Request, *, vocab_size: int, max_len: int, eos_token_ids: tuple[int, ...]) -> list[int]:
    """What the toy model answers to a request, computed without pages or batches."""
    sampling = request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    token_ids = list(request.prompt_token_ids)
    limit = max_len if sampling.max_tokens is None else min(max_len, len(token_ids) + sampling.max_tokens)
    output: list[int] = []
    while len(token_ids) < limit:
        token_ids.append(next_token(token_ids, vocab_size))
        output.append(token_ids[-1])
        if token_ids[-1] in stops and len(output) >= sampling.min_tokens:
            break
    return output


class ToySlot:
    """An admitted sequence."""

    def __init__(self, admission: Admission) -> None:
        self.token_ids = list(admission.token_ids)
        self.pages: list[int] = []
        self.max_len = admission.num_prompt_tokens + admission.max_tokens
        self.num_prompt_tokens = admission.num_prompt_tokens
        self.min_tokens = admission.sampling.min_tokens
        self.stops = set(admission.eos_token_ids) | set(admission.sampling.stop_token_ids)
        self.has_ended = False


class ToyWorker:
    """Runs batches over `num_pages` pages. memory: int32 [num_pages, K and V, page_size], a page-major pool of one
    layer.
    """

    def __init__(self, num_pages: int, page_size: int, *, vocab_size: int) -> None:
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.memory = np.full((num_pages, 2, page_size), -1, dtype=np.int32)
        self.num_computed_tokens = 0
        self._slots: dict[int, ToySlot] = {}

    def step(self, batch: Batch) -> StepOutput:
        """Run one batch: all rows write their KV, then all rows read."""
        for slot in batch.releases:
            del self._slots[slot]
        for admission in batch.admissions:
            if admission.slot in self._slots:
                raise AssertionError(f"slot {admission.slot} is admitted twice")
            self._slots[admission.slot] = ToySlot(admission)
        for step in batch.steps:
            self._slots[step.slot].pages += step.new_pages
        live = [step for step in batch.steps if not self._slots[step.slot].has_ended]
        for step in live:
            self._write(step)
        return StepOutput(batch.step_id, [self._read(step) for step in batch.steps], 0.0)

    def store(self, pages: list[int], start: int, token_ids: list[int]) -> None:
        """Write the KV of these tokens, at positions from `start` on."""
        for position, token_id in enumerate(token_ids, start):
            page, offset = pages[position // self.page_size], position % self.page_size
            self.memory[page, :, offset] = token_id, position

    def load(self, pages: list[int], num_tokens: int) -> list[int]:
        """Read the tokens back; -1 where the page holds another position, so that the output goes wrong."""
        keys, values = self.memory[pages].transpose(1, 0, 2).reshape(2, -1)[:, :num_tokens]
        seen: list[int] = np.where(values == np.arange(num_tokens), keys, -1).tolist()
        return seen

    def _write(self, step: SequenceStep) -> None:
        slot = self._slots[step.slot]
        self.num_computed_tokens += step.num_tokens
        self.store(slot.pages, step.start, slot.token_ids[step.start : step.start + step.num_tokens])

    def _read(self, step: SequenceStep) -> RowOutput:
        slot = self._slots[step.slot]
        if slot.has_ended or not step.samples:
            return RowOutput([])
        token_id = next_token(self.load(slot.pages, step.start + step.num_tokens), self.vocab_size)
        slot.token_ids.append(token_id)
        num_output_tokens = len(slot.token_ids) - slot.num_prompt_tokens
        slot.has_ended = len(slot.token_ids) >= slot.max_len or (
            token_id in slot.stops and num_output_tokens >= slot.min_tokens
        )
        return RowOutput([token_id])


class ToyExecutor(PolledExecutor):
    """Runs a toy worker, by default a plain one of the shape that `info` says."""

    def __init__(self, info: EngineInfo, worker: ToyWorker | None = None) -> None:
        self.worker = worker or ToyWorker(info.num_pages, info.page_size, vocab_size=info.vocab_size)
        info = msgspec.structs.replace(info, kv_address=self.worker.memory.ctypes.data)
        super().__init__(info, self.worker.step)
