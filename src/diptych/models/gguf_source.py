"""Weights in a GGUF file, dequantised as they are read.

Whatever the file's quantisation, a tensor is expanded a few rows at a time and converted at once to the dtype that the
model computes in, so that the float32 form of a whole tensor never exists.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile, GGUFTensor
from diptych.kernels.gguf_linear import StoredBlocks, has_block_kernel
from diptych.layers.shard import Part, Share
from diptych.models.config import TransformerConfig
from diptych.models.gguf import TensorNames, expert_of, family_of

SERIAL_ELEMENTS = 1 << 14
"""Half of what torch copies on one thread."""

CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at once: large enough that numpy's call overhead vanishes, small enough for the cache."""


class GGUFSource:
    """A WeightSource over one GGUF file, under Hugging Face names and conventions.

    Args: dtype: what tensors are delivered in, rounded from float32. keeps_blocks: matrices of a format that there are
    kernels for are delivered as they are, to who asks for blocks.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: TransformerConfig,
        *,
        dtype: torch.dtype = torch.float32,
        keeps_blocks: bool = False,
    ) -> None:
        self._file = file
        self._names = TensorNames(file, config)
        self._family = family_of(file)
        self._config = config
        self._dtype = dtype
        self._keeps_blocks = keeps_blocks

    def names(self) -> list[str]:
        """Every tensor, under its Hugging Face name where it has one."""
        return [self._names.to_huggingface(name) for name in self._file.tensors]

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return self._names.to_gguf(name) in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape. Raises ConfigError naming the tensor if it is missing."""
        return self._tensor(name).shape

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements start:stop along `dim` (default: all), in the source's dtype; the caller owns the memory."""
        tensor = self._tensor(name)
        if len(tensor.shape) == 1:
            values = torch.from_numpy(self._elements(tensor, name)).to(self._dtype)
            return values[start:stop].clone()
        if len(tensor.shape) != 2 or dim not in (0, 1):
            raise ConfigError(f"tensor {name} of shape {tensor.shape} cannot be sliced along dimension {dim}.")
        order = self._row_order(tensor, name)
        if dim == 0:
            return self._read_rows(tensor, order[start:stop], slice(None))
        return self._read_rows(tensor, order, slice(start, stop))

    def blocks(self, name: str, part: Part) -> StoredBlocks | None:
        """Part of the matrix as the file holds it; None if it is of no such format, or blocks are not to be kept.

        Raises ConfigError for columns that do not begin and end with a block.
        """
        tensor = self._tensor(name)
        if not self._keeps_blocks or len(tensor.shape) != 2 or not has_block_kernel(tensor.kind, tensor.shape[1]):
            return None
        order, share = self._row_order(tensor, name).astype(np.int64), part.share
        return StoredBlocks(
            rows=self._file.rows(tensor) if part.dim == 0 else self._stored_columns(tensor, name, share),
            kind=int(tensor.kind),
            in_features=tensor.shape[1] if part.dim == 0 else len(share),
            order=order[share.start : share.stop] if part.dim == 0 else order,
            release=partial(self._file.release, tensor),
        )

    def _stored_columns(self, tensor: GGUFTensor, name: str, share: Share) -> npt.NDArray[np.uint8]:
        """The bytes of some columns, which must be whole blocks."""
        rows = self._file.rows(tensor)
        if share.is_whole:
            return rows
        block_len, block_nbytes = GGML_QUANT_SIZES[tensor.kind]
        if share.start % block_len or share.stop % block_len or not has_block_kernel(tensor.kind, len(share)):
            raise ConfigError(
                f"a rank's {len(share)} of {share.size} inputs of {name} are no whole blocks of {block_len} "
                f"({tensor.kind.name}): quantization gguf cannot cut them; use int8 or none, or a smaller tp_size"
            )
        first, last = share.start // block_len * block_nbytes, share.stop // block_len * block_nbytes
        return np.ascontiguousarray(rows[:, first:last])

    def _tensor(self, name: str) -> GGUFTensor:
        tensor = self._file.tensors.get(self._names.to_gguf(name) or "")
        if tensor is None:
            raise ConfigError(
                f"{self._file.path} has no tensor {name} ({self._names.to_gguf(name)} in GGUF); convert it again."
            )
        expert = expert_of(name)
        return tensor if expert is None else _of_expert(tensor, expert, name)

    def _elements(self, tensor: GGUFTensor, name: str) -> npt.NDArray[np.float32]:
        """A one-dimensional tensor in float32, with what the format did to norms and biases undone."""
        values = dequantise(self._file.rows(tensor), tensor.kind).reshape(-1)
        if name.endswith("norm.weight"):
            return values - np.float32(self._family.norm_offset)
        return values[self._row_order(tensor, name)]

    def _row_order(self, tensor: GGUFTensor, name: str) -> npt.NDArray[np.intp]:
        """Row of the file for each row that Hugging Face has.

        Llama's q and k are stored with the two halves of each head interleaved: 0, D/2, 1, D/2 + 1, ...
        """
        num_rows = tensor.shape[0]
        if not self._family.permutes_query_key or not name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            return np.arange(num_rows)
        head_dim = self._config.head_dim
        if num_rows % head_dim != 0:
            raise ConfigError(f"{self._file.path}: {name} has {num_rows} rows, no multiple of the head's {head_dim}.")
        return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

    def _read_rows(self, tensor: GGUFTensor, order: npt.NDArray[np.intp], columns: slice) -> torch.Tensor:
        stored = self._file.rows(tensor)
        num_columns = len(range(*columns.indices(tensor.shape[1])))
        result = torch.empty((len(order), num_columns), dtype=self._dtype)
        chunk_len = max(1, CHUNK_ELEMENTS // tensor.shape[1])
        for first in range(0, len(order), chunk_len):
            rows = stored[order[first : first + chunk_len]]
            values = dequantise(rows, tensor.kind)[:, columns]
            _convert(torch.from_numpy(values), result[first : first + chunk_len])
        self._file.release(tensor)
        return result


def _of_expert(tensor: GGUFTensor, expert: int, name: str) -> GGUFTensor:
    """One expert's matrix of the tensor [experts, O, I] that holds those of a whole layer."""
    if len(tensor.shape) != 3 or expert >= tensor.shape[0]:
        raise ConfigError(f"{tensor.name} has shape {tensor.shape}, and so holds no {name}; convert it again.")
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * nbytes, nbytes=nbytes)


def _convert(values: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy in pieces that torch does not spread over threads: on a busy machine thousands of barriers cost seconds."""
    num_rows = max(1, SERIAL_ELEMENTS // max(1, values.shape[1]))
    for source, target in zip(values.split(num_rows), destination.split(num_rows), strict=True):
        target.copy_(source)


def dequantise(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """float32 `[rows, elements]` of a tensor's bytes `[rows, bytes of a row]`; a fresh array.

    The library's own entry point works in groups of sixteen rows; its row function takes any number at once.
    """
    num_rows = rows.shape[0]
    rows = np.ascontiguousarray(rows)
    match kind:
        case GGMLQuantizationType.F32:
            return rows.view(np.float32).reshape(num_rows, -1).copy()
        case GGMLQuantizationType.F16:
            return rows.view(np.float16).reshape(num_rows, -1).astype(np.float32)
        case _:
            quantisation = vars(quants)[kind.name]
            quantisation.init_grid()
            values: npt.NDArray[np.float32] = quantisation.dequantize_rows(rows)
            return values
