"""The choice of a token from adjusted logits: the numbers that each slot asked for, its seed and its position.

Owns these numbers and the way to the kernels, torch's on a CPU and Triton's on a CUDA device, which is not waited for.
Knows nothing of penalties, grammars or errors. Used on the worker's thread only. R = rows of the batch, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.core.request import SamplingParams
from diptych.sampling.random import uniforms
from diptych.sampling.truncation import SamplingRows, TokenSampler, argmax_rows

if TYPE_CHECKING:
    from diptych.sampling.device_draw import DeviceDraw


class TokenChoice:
    """Chooses tokens for rows of slots 0 .. max_slots - 1.

    positions: int64 [max_slots], output tokens so far; the noise of the next one depends on it.
    """

    def __init__(self, vocab_size: int, max_slots: int, *, device: torch.device) -> None:
        self.positions = np.zeros(max_slots, dtype=np.int64)
        self._seeds = np.zeros(max_slots, dtype=np.int64)
        self._temperature = np.zeros(max_slots, dtype=np.float64)  # 0 for every greedy slot
        self._top_k = np.zeros(max_slots, dtype=np.int64)
        self._top_p = np.ones(max_slots, dtype=np.float64)
        self._min_p = np.zeros(max_slots, dtype=np.float64)
        self._token_sampler = TokenSampler(vocab_size, device=device)
        self._device_draw = _new_device_draw(vocab_size, max_slots, device) if device.type == "cuda" else None

    def admit(self, slot: int, sampling: SamplingParams, position: int) -> None:
        """Bind a slot whose next output token is number `position`."""
        self.positions[slot] = position
        self._seeds[slot] = sampling.seed or 0
        self._temperature[slot] = 0.0 if sampling.is_greedy else sampling.temperature
        self._top_k[slot] = max(0, sampling.top_k)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p

    def choose(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> torch.Tensor:
        """One token a row: int64 [R] on the device of the logits, -1 where a row has a NaN, a +inf or no token left.

        Args: logits: float [R, V], not modified. slots: the rows' slots.
        """
        if self._device_draw is not None:
            return self._device_draw.draw(logits, self._numbers(slots, np.arange(len(slots))))
        logits = logits.float()
        rows = np.flatnonzero(self._temperature[slots] > 0.0)
        if len(rows) == 0:
            return _likeliest(logits)
        drawn, is_sound = self._token_sampler.draw(logits, self._numbers(slots[rows], rows))
        drawn = torch.where(is_sound, drawn, -1)
        if len(rows) == len(slots):
            return drawn
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        token_ids[torch.from_numpy(rows).to(logits.device)] = drawn
        for row in np.flatnonzero(self._temperature[slots] <= 0.0).tolist():  # row by row: no copy of others' logits
            token_ids[row] = _likeliest(logits[row : row + 1])[0]
        return token_ids

    def _numbers(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> SamplingRows:
        return SamplingRows(
            rows=rows,
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            noise=uniforms(self._seeds[slots], self.positions[slots]),
        )


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    token_ids = argmax_rows(logits)
    return torch.where(torch.isfinite(logits.gather(1, token_ids[:, None]))[:, 0], token_ids, -1)


def _new_device_draw(vocab_size: int, max_rows: int, device: torch.device) -> DeviceDraw:
    from diptych.sampling.device_draw import DeviceDraw  # needs Triton, which a machine without a GPU may lack

    return DeviceDraw(vocab_size, max_rows, device=device)
