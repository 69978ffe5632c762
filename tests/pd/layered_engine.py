"""The toy engine with a KV of many layers, heads and dims: every element is a hash of where it belongs.

Logprobs are made up, but the same on every run. Started like `toy_engine`.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import toy_engine
from numpy.typing import NDArray

from diptych.config import EngineConfig
from diptych.core.batch import Batch, RowOutput, SequenceStep, StepOutput, TokenLogprobs
from diptych.core.messages import EngineInfo
from diptych.engine.toy import ToyWorker

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 3, 2, 5


def elements(token_ids: list[int], positions: NDArray[np.int64] | None = None) -> NDArray[np.int32]:
    """The KV of tokens: int32 [token, layer, K or V, head, dim], each element another number."""
    where = np.arange(len(token_ids)) if positions is None else positions
    place = np.arange(NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM)
    numbers = (where[:, None] * 64 + np.array(token_ids)[:, None]) * len(place) + place
    return numbers.astype(np.int32).reshape(-1, NUM_LAYERS, 2, NUM_HEADS, HEAD_DIM)


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """What the toy says of a sampled token."""
    return TokenLogprobs(token_id, -token_id / 8, 1, [(i, -float(i) / 4 - 0.5) for i in range(num_top)])


class LayeredWorker(ToyWorker):
    """A toy worker whose pool is [num_pages, layer, K or V, page_size, head, dim]."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size, vocab_size=toy_engine.VOCAB)
        self.memory = np.full((num_pages, NUM_LAYERS, 2, page_size, NUM_HEADS, HEAD_DIM), -1, dtype=np.int32)
        self._num_top: dict[int, int | None] = {}

    def step(self, batch: Batch) -> StepOutput:
        for admission in batch.admissions:
            self._num_top[admission.slot] = admission.sampling.logprobs
        return super().step(batch)

    def store(self, pages: list[int], start: int, token_ids: list[int]) -> None:
        positions = np.arange(start, start + len(token_ids))
        for position, element in zip(positions.tolist(), elements(token_ids, positions), strict=True):
            self.memory[pages[position // self.page_size], :, :, position % self.page_size] = element

    def load(self, pages: list[int], num_tokens: int) -> list[int]:
        seen = self.memory[pages].transpose(0, 3, 1, 2, 4, 5).reshape(-1, NUM_LAYERS, 2, NUM_HEADS, HEAD_DIM)
        first = seen[:num_tokens, 0, 0, 0, 0] // (NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM)
        token_ids = (first - np.arange(num_tokens) * 64).tolist()
        is_right = (seen[:num_tokens] == elements(token_ids)).all(axis=(1, 2, 3, 4))
        return np.where(is_right, token_ids, -1).tolist()

    def _read(self, step: SequenceStep, drafts: list[int]) -> RowOutput:
        row, num_top = super()._read(step, drafts), self._num_top[step.slot]
        if not row.token_ids or num_top is None:
            return row
        return RowOutput(row.token_ids, [logprobs_of(row.token_ids[0], num_top)])


class LayeredExecutor(toy_engine.PacedExecutor):
    """The paced toy over a layered worker."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info, LayeredWorker(info.num_pages, info.page_size))


def layered_executor(config: EngineConfig) -> LayeredExecutor:
    """What the engine computes with."""
    info = toy_engine.toy_info(config)
    row_nbytes = NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * 4
    info = msgspec.structs.replace(
        info,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        page_nbytes=info.page_size * row_nbytes,
        fingerprint="layered",
    )
    return LayeredExecutor(info)


if __name__ == "__main__":
    sys.exit(toy_engine.main(layered_executor))
