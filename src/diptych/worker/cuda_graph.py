"""Decode steps as CUDA graphs, one for each batch size of a ladder: one launch instead of hundreds.

Owns the graphs and the device tensor that holds a step's numbers. What a step computes is given. Worker's thread.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

NUMBERS = ("token_ids", "positions", "kv_slots", "kv_lens", "rows", "store_slots")
"""What a decode row brings, int64 each."""
PADDING = (0, 0, -1, 0, 0, -1)
"""The same of a row that is not there: nothing is attended, written or stored."""


def ladder(max_rows: int) -> list[int]:
    """Batch sizes to capture: close together where a step is short, so that little of it is padding."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32)]
    return sorted({min(size, max_rows) for size in sizes})


@dataclass(frozen=True, slots=True)
class DecodeNumbers:
    """One step's rows, int64 [6, B], in the order of `NUMBERS`."""

    values: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[NUMBERS.index(name)]


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """Where a graph leaves its results: logits [B, vocab], the likeliest tokens, int64 [B], and the slots, int64 [B],
    whose last tokens they have become.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor
    store_slots: torch.Tensor


class DecodeGraphs:
    """Captured decode steps.

    Args: compute: from a step's numbers to its results, without synchronisation; captured once for each size.
    """

    def __init__(self, max_rows: int, compute: Callable[[DecodeNumbers], GraphOutput], *, device: torch.device) -> None:
        self.sizes = ladder(max_rows)
        self._compute = compute
        self._numbers = torch.zeros(len(NUMBERS) * max_rows, dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, GraphOutput]] = {}

    def size_for(self, num_rows: int) -> int | None:
        """The smallest captured size that holds `num_rows`; None if none does."""
        index = bisect.bisect_left(self.sizes, num_rows)
        size = self.sizes[index] if index < len(self.sizes) else None
        return size if size in self._graphs else None

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture every size, largest first so that the smaller ones share its memory. progress: told done and all."""
        started = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self.sizes), start=1):
            numbers = self._numbers_of(size)
            numbers.values.copy_(torch.tensor(PADDING)[:, None].expand(-1, size))
            self._compute(numbers)  # compiles kernels and warms up cuBLAS, neither of which can be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._compute(numbers)
            self._graphs[size] = (graph, output)
            progress(done, len(self.sizes))
        torch.cuda.synchronize()
        logger.info("captured %d decode graphs in %.1f s", len(self.sizes), time.perf_counter() - started)

    def run(self, numbers: torch.Tensor) -> GraphOutput:
        """Run the step of `numbers`, int64 [6, size] in pinned memory; the result holds until the next run."""
        size = numbers.shape[1]
        self._numbers_of(size).values.copy_(numbers, non_blocking=True)
        graph, output = self._graphs[size]
        graph.replay()
        return output

    def _numbers_of(self, size: int) -> DecodeNumbers:
        return DecodeNumbers(self._numbers[: len(NUMBERS) * size].view(len(NUMBERS), size))
