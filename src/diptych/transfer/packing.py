"""Gathers small pieces of host memory into one buffer, and scatters them again: numpy, one call for all pieces.

The kernels of `staging` for host memory. Pieces must be of one length and lie at multiples of a common unit, as slices
of pages do.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from diptych.errors import InvariantError
from diptych.transfer.plan import Int64s


def gather(memory: NDArray[np.uint8], offsets: Int64s, *, nbytes: int, packed: NDArray[np.uint8]) -> None:
    """Copy the pieces of `nbytes` bytes at `offsets` of `memory` to `packed`, one after the other.

    Raises InvariantError if `packed` has another size than they have together, or they have no common unit of memory.
    """
    rows, index = _rows(memory, offsets, nbytes)
    if packed.nbytes != len(offsets) * nbytes:
        raise InvariantError(f"{len(offsets)} pieces of {nbytes} bytes do not fill a buffer of {packed.nbytes}")
    np.take(rows, index, axis=0, out=packed.view(rows.dtype).reshape(len(index), -1), mode="clip")


def scatter(packed: NDArray[np.uint8], offsets: Int64s, *, nbytes: int, memory: NDArray[np.uint8]) -> None:
    """Copy what `gather` packed to `offsets` of `memory`. Raises as that does."""
    rows, index = _rows(memory, offsets, nbytes)
    if packed.nbytes != len(offsets) * nbytes:
        raise InvariantError(f"{len(offsets)} pieces of {nbytes} bytes do not fill a buffer of {packed.nbytes}")
    rows[index] = packed.view(rows.dtype).reshape(len(index), -1)


def _rows(memory: NDArray[np.uint8], offsets: Int64s, nbytes: int) -> tuple[NDArray[np.uint64], Int64s]:
    """Memory as rows of the largest unit that pieces and offsets share, and the rows of all pieces, in order."""
    unit = math.gcd(nbytes, int(np.gcd.reduce(offsets)))
    if unit % 8 or memory.nbytes % unit:
        raise InvariantError(f"pieces of {nbytes} bytes share no unit of 8 bytes or more that divides {memory.nbytes}")
    rows = memory.view(np.uint64).reshape(-1, unit // 8)
    index = (offsets // unit)[:, None] + np.arange(nbytes // unit)
    return rows, index.ravel()
