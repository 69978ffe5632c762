"""A worker without weights: a toy model over real pages, for tests of scheduling and transfer.

Its keys are token ids and its values positions, written to the page that the batch names. A token is sampled from a
hash of what the pages hold, so a page lost, shared wrongly, reused too early or never written changes the output. Never
imports torch.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable

import msgspec
import numpy as np

from diptych.core.batch import Admission, Batch, RowOutput, SequenceStep, StepOutput
from diptych.core.calls import WorkerCall
from diptych.core.messages import EngineInfo
from diptych.core.request import Request
from diptych.engine.executor import PolledExecutor, refuse_call


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


def no_guess(token_ids: list[int], most: int) -> list[int]:
    """Drafts of a worker that does not speculate."""
    return []


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

    def append(self, token_id: int) -> None:
        """Take over a sampled token, which may end the sequence."""
        self.token_ids.append(token_id)
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        self.has_ended = len(self.token_ids) >= self.max_len or (
            token_id in self.stops and num_output_tokens >= self.min_tokens
        )


class ToyWorker:
    """Runs batches over `num_pages` pages. memory: int32 [num_pages, K and V, page_size], a page-major pool of one
    layer. guess: drafts that may follow a text, at most so many; by default none.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        vocab_size: int,
        guess: Callable[[list[int], int], list[int]] = no_guess,
    ) -> None:
        self._guess = guess
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
        drafts = {step.slot: self._guess(self._slots[step.slot].token_ids, step.max_drafts) for step in live}
        for step in live:
            self._write(step, drafts[step.slot])
        rows = [self._read(step, drafts.get(step.slot, [])) for step in batch.steps]
        return StepOutput(batch.step_id, rows, 0.0)

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

    def _write(self, step: SequenceStep, drafts: list[int]) -> None:
        slot = self._slots[step.slot]
        self.num_computed_tokens += step.num_tokens + len(drafts)
        self.store(slot.pages, step.start, slot.token_ids[step.start : step.start + step.num_tokens] + drafts)

    def _read(self, step: SequenceStep, drafts: list[int]) -> RowOutput:
        slot = self._slots[step.slot]
        if slot.has_ended or not step.samples:
            return RowOutput([])
        token_ids: list[int] = []
        for draft in (*drafts, -1):
            num_seen = step.start + step.num_tokens + len(token_ids)
            token_ids.append(next_token(self.load(slot.pages, num_seen), self.vocab_size))
            slot.append(token_ids[-1])
            if token_ids[-1] != draft or slot.has_ended:
                break
        return RowOutput(token_ids, num_drafts=len(drafts))


class ToyExecutor(PolledExecutor):
    """Runs a toy worker, by default a plain one of the shape that `info` says. obey: what it does about calls."""

    def __init__(
        self,
        info: EngineInfo,
        worker: ToyWorker | None = None,
        *,
        obey: Callable[[WorkerCall], bytes] = refuse_call,
    ) -> None:
        self.worker = worker or ToyWorker(info.num_pages, info.page_size, vocab_size=info.vocab_size)
        info = msgspec.structs.replace(info, kv_address=self.worker.memory.ctypes.data)
        super().__init__(info, self.worker.step, obey)
