"""Linear layers and embeddings over a GGUF file's own blocks: 2 to 8 bits a weight, computed as they are.

Blocks are reordered once, as they are copied out of the file, and never expanded in memory; inputs stay bfloat16 and
sums float32, so that a result is as exact as one over expanded weights that nobody rounded. Knows nothing of files or
models.

T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diptych.kernels.library import Kernels, kernels
from diptych.kernels.linear import BLOCK_OUTPUTS, Activation, LayerStructure, LinearKernel, block_bias
from diptych.kernels.memory import empty_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """A matrix [O, I] as a GGUF file holds it.

    rows: uint8 [O, bytes of a row], contiguous; may be a view of the file. kind: ggml's number of the format. order:
    the row of the file that each output is, int64 [O]. release: called when the rows have been copied and will not be
    read again.
    """

    rows: npt.NDArray[np.uint8]
    kind: int
    in_features: int
    order: npt.NDArray[np.int64]
    release: Callable[[], None]


class _Part(ctypes.Structure):
    """GgufPart of csrc/abi.h."""

    _fields_ = (("blocks", ctypes.c_void_p), ("num_blocks", ctypes.c_int64), ("format", ctypes.c_int32))


def has_block_kernel(kind: int, in_features: int) -> bool:
    """Whether rows of this many inputs in ggml's format `kind` can be computed as they are."""
    library = kernels()
    return library is not None and library.gguf_block_nbytes(kind, in_features) > 0


class GGUFLinear(LinearKernel):
    """`x @ weight.T + bias` for bfloat16 x [T, I] and a weight of stored parts, one below the other.

    Args: parts: each of any format that has a kernel; all but the last of a multiple of 16 outputs. bias: bfloat16 [O].
    gated: there are two parts, gate and up, and the result is activation(gate) * up.
    """

    def __init__(
        self, parts: Sequence[StoredBlocks], bias: torch.Tensor | None = None, *, gated: Activation | None = None
    ) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded; ask has_block_kernel first"
        nbytes = [_packed_nbytes(library, part) for part in parts]
        weight = empty_weight((sum(nbytes),), torch.uint8)
        self._parts = (_Part * len(parts))()
        for index, (part, memory) in enumerate(zip(parts, weight.split(nbytes), strict=True)):
            _pack(library, part, memory)
            self._parts[index] = _Part(memory.data_ptr(), _num_blocks(part), part.kind)
        blocks = None if bias is None else block_bias(bias, is_interleaved=gated is not None)
        out_features = sum(len(part.order) for part in parts)
        layer = LayerStructure(
            bias=None if blocks is None else blocks.data_ptr(),
            out_features=sum(map(_num_blocks, parts)) * BLOCK_OUTPUTS,
            in_features=parts[0].in_features,
            num_outputs=out_features if gated is None else out_features // 2,
            parts=ctypes.addressof(self._parts),
            num_parts=len(parts),
        )
        super().__init__(weight, layer, bias=blocks, in_features=parts[0].in_features, gated=gated)

        self._num_outputs_of_part = [len(part.order) for part in parts]

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Outputs start:stop of all parts, expanded to bfloat16 [stop - start, I]."""
        read, begin = [], 0
        for index, num_outputs in enumerate(self._num_outputs_of_part):
            first, last = max(start - begin, 0), min(stop - begin, num_outputs)
            begin += num_outputs
            if first >= last:
                continue
            # The kernel reads the first part of a layer: an embedding has no other.
            alone = LayerStructure.from_buffer_copy(self._layer)
            alone.parts = ctypes.addressof(self._parts[index])
            read.append(self._rows_of(ctypes.addressof(alone), torch.arange(first, last), None))
        return torch.cat(read)


def _num_blocks(part: StoredBlocks) -> int:
    return -(-len(part.order) // BLOCK_OUTPUTS)


def _packed_nbytes(library: Kernels, part: StoredBlocks) -> int:
    nbytes: int = library.gguf_block_nbytes(part.kind, part.in_features)
    return nbytes * _num_blocks(part)


def _pack(library: Kernels, part: StoredBlocks, memory: torch.Tensor) -> None:
    assert part.rows.flags.c_contiguous and part.order.dtype == np.int64, "blocks are packed from adjacent rows"
    order = np.ascontiguousarray(part.order)
    library.gguf_pack(
        memory.data_ptr(), part.rows.ctypes.data, order.ctypes.data, len(order), part.in_features, part.kind
    )
    part.release()
