"""Sampling noise: a pure function of (seed, output position), so that a batch cannot change a request's text.

Owns the counter-based generator. Knows nothing of slots, logits or devices; numpy only, on the worker's thread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform number in [0, 1) per row, by SplitMix64 (Steele et al., OOPSLA 2014).

    Args: seeds: int64 [R], any value. positions: int64 [R], 0 for a request's first output token.
    Returns: float64 [R], multiples of 2**-53.
    """
    # The seed is mixed before it is added: neighbouring seeds must not give the same stream shifted by one token.
    state = _mix(seeds.astype(np.int64).view(np.uint64) + _GOLDEN) + (positions + 1).astype(np.uint64) * _GOLDEN
    return np.asarray((_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return np.asarray(value ^ (value >> np.uint64(31)))
