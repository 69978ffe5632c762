"""What adapters add to a packed linear layer: two thin GEMMs for each segment of rows, all in one call.

T = tokens, I = in features, O = out features, r = rank. Knows nothing of models, names or files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.kernels.library import Kernels, kernels
from diptych.kernels.linear import BLOCK_OUTPUTS, TILE_INPUTS, LayerStructure, LinearKernel, pack_weight
from diptych.kernels.memory import Arena, empty

_BFLOAT16, _BLOCKS = 0, 5
# Rows of one adapter that a thread takes at once: enough for tiles, few enough to share a prompt between threads.
_MAX_SEGMENT_ROWS = 64


class _LowRank(ctypes.Structure):
    """LowRank of csrc/abi.h."""

    _fields_ = (("down", LayerStructure), ("up", LayerStructure), ("column", ctypes.c_int64))


class _AdaptedLinear(ctypes.Structure):
    """AdaptedLinear of csrc/abi.h."""

    _fields_ = (("parts", ctypes.c_void_p), ("num_parts", ctypes.c_int64))


class _AdaptedLayer(ctypes.Structure):
    """AdaptedLayer of csrc/abi.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("query_key_value", "attention_output", "gate_up", "down"))


class _Step(ctypes.Structure):
    """AdapterStep of csrc/abi.h."""

    _fields_ = (("segments", ctypes.c_void_p), ("num_segments", ctypes.c_int64))


class _Rows(ctypes.Structure):
    """AdapterRows of csrc/abi.h."""

    _fields_ = (("before", _Step), ("after", _Step))


class SegmentTable:
    """A step's rows by adapter, as the library reads them. segments: (first row, rows, slot or -1) of all, in order."""

    def __init__(self, segments: Sequence[tuple[int, int, int]]) -> None:
        pieces = [
            (start, min(_MAX_SEGMENT_ROWS, begin + count - start), slot)
            for begin, count, slot in segments
            for start in range(begin, begin + count, _MAX_SEGMENT_ROWS)
        ]
        self._held = torch.tensor(pieces, dtype=torch.int64).view(-1, 3)
        self.step = _Step(self._held.data_ptr(), len(pieces))
        self.address = ctypes.addressof(self.step)


class StackSegments:
    """The segments of a stack of layers. left: of the rows that are left once the last layer has attended.

    address_of_last: for the layer that goes on with these alone; address: for those before it.
    """

    def __init__(self, rows: SegmentTable, left: SegmentTable) -> None:
        self._held = (rows, left)
        self._rows, self._rows_of_last = _Rows(rows.step, rows.step), _Rows(rows.step, left.step)
        self.address = ctypes.addressof(self._rows)
        self.address_of_last = ctypes.addressof(self._rows_of_last)


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """`up @ (scale * down @ x)` in the kernels' order; `down` and `up` are layers without a place yet."""

    down: LayerStructure
    up: LayerStructure
    held: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, down: torch.Tensor, up: torch.Tensor, scale: float, memory: Arena) -> PackedLowRank:
        """Pack down [r, I] and up [O, r]. Both are rounded to bfloat16, as is the product with `scale` in between."""
        narrow, wide = _packed(down, memory), _packed(up, memory)
        padded_inputs, padded_rank = narrow.shape[1] * 2, wide.shape[1] * 2
        scales = torch.full((len(narrow) * BLOCK_OUTPUTS,), scale)
        return cls(
            LayerStructure(
                weight=narrow.data_ptr(),
                scales=scales.data_ptr(),
                out_features=len(narrow) * BLOCK_OUTPUTS,
                in_features=padded_inputs,
                num_outputs=min(len(narrow) * BLOCK_OUTPUTS, padded_rank),
                epilogue=_BFLOAT16,
            ),
            LayerStructure(
                weight=wide.data_ptr(),
                out_features=len(wide) * BLOCK_OUTPUTS,
                in_features=padded_rank,
                num_outputs=len(up),
                epilogue=_BLOCKS,
            ),
            (narrow, wide, scales),
        )

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in self.held)


class AdaptedKernel:
    """A packed linear layer and what the adapters in `num_slots` slots add to it.

    Args: part_sizes: outputs of each projection that the layer holds, in order.
    """

    def __init__(self, linear: LinearKernel, part_sizes: Sequence[int], num_slots: int) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded"
        self._library: Kernels = library
        self._linear = linear
        self._part_sizes = tuple(part_sizes)
        self._parts = (_LowRank * (num_slots * len(part_sizes)))()
        self._held: dict[int, Sequence[PackedLowRank | None]] = {}
        self._adapted = _AdaptedLinear(ctypes.addressof(self._parts), len(part_sizes))
        self.address = ctypes.addressof(self._adapted)

    def put(self, slot: int, parts: Sequence[PackedLowRank | None]) -> None:
        """Whose rows are in `slot` from now on; None: nothing is added to that part."""
        column = 0
        for index, (part, size) in enumerate(zip(parts, self._part_sizes, strict=True)):
            place = self._parts[slot * len(self._part_sizes) + index]
            place.down = LayerStructure() if part is None else part.down
            place.up = LayerStructure() if part is None else part.up
            place.up.block_step = BLOCK_OUTPUTS * (len(self._part_sizes) if self._linear.is_gated else 1)
            place.column = index * BLOCK_OUTPUTS if self._linear.is_gated else column
            column += size
        self._held[slot] = parts

    def __call__(self, x: torch.Tensor, segments: SegmentTable) -> torch.Tensor:
        """The layer's output for x [T, I] with the segments' adapters."""
        x = self._linear.padded(x)
        addend = empty((x.shape[0], self._linear.out_features), torch.bfloat16)
        self._library.adapter_addend(
            self.address, segments.address, x.data_ptr(), x.stride(0), addend.data_ptr(), addend.stride(0)
        )
        return self._linear(x, addend)


class AdaptedLayer:
    """The four adapted GEMMs of a decoder layer, in the order of their use."""

    def __init__(self, linears: Sequence[AdaptedKernel]) -> None:
        self._held = tuple(linears)
        self._layer = _AdaptedLayer(*(linear.address for linear in linears))
        self.address = ctypes.addressof(self._layer)


def _packed(weight: torch.Tensor, memory: Arena) -> torch.Tensor:
    """A copy of the weight, padded with zeros to whole blocks and in the kernels' order."""
    shape = (_whole(weight.shape[0], BLOCK_OUTPUTS), _whole(weight.shape[1], TILE_INPUTS))
    padded = memory.take(shape[0] * shape[1] * 2).view(torch.bfloat16).view(shape)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return pack_weight(padded)


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit
