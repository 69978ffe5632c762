"""Weights that somebody hands over, in memory: whole tensors, gathered piece by piece before anything uses them."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch

from diptych.core.calls import TensorBytes
from diptych.errors import ConfigError, RequestError

_DTYPES = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
}


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor, uint8 [nbytes]."""
    memory: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return memory


class MemorySource:
    """A WeightSource over tensors that arrive in pieces.

    Args: shapes: every tensor that may arrive, by name, with its full shape.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_missing_bytes: dict[str, int] = {}

    def add(self, piece: TensorBytes, name: str) -> None:
        """Take the next piece of tensor `name`. Raises RequestError if name, shape, dtype or size do not fit."""
        if name not in self._tensors:
            self._tensors[name] = self._allocate(piece, name)
            self._num_missing_bytes[name] = self._tensors[name].nbytes
        tensor = self._tensors[name]
        is_same = (tuple(piece.shape), _DTYPES.get(piece.dtype)) == (tuple(tensor.shape), tensor.dtype)
        start = tensor.nbytes - self._num_missing_bytes[name]
        if not is_same or start != piece.start or start + len(piece.data) > tensor.nbytes:
            raise RequestError(
                f"tensor {piece.name}: {len(piece.data)} bytes from {piece.start} on of {piece.dtype} "
                f"{list(piece.shape)} do not continue {start} bytes of {tensor.dtype} {list(tensor.shape)}",
                param="named_tensors",
            )
        bytes_of(tensor)[start : start + len(piece.data)] = np.frombuffer(piece.data, dtype=np.uint8)
        self._num_missing_bytes[name] -= len(piece.data)

    def put(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Memory for the whole tensor, which the caller fills. Raises RequestError if name, shape or dtype do not
        fit.
        """
        tensor = self._tensors[name] = self._allocate(TensorBytes(name, dtype, shape, b""), name)
        self._num_missing_bytes[name] = 0
        return tensor

    def check_complete(self) -> None:
        """Raise RequestError naming a tensor of which bytes are missing, or if there is none at all."""
        if not self._tensors:
            raise RequestError("no tensor was sent", param="named_tensors")
        for name, missing in self._num_missing_bytes.items():
            if missing:
                raise RequestError(f"tensor {name}: {missing} bytes have not arrived", param="named_tensors")

    def names(self) -> list[str]:
        """Every tensor that has arrived."""
        return list(self._tensors)

    @property
    def is_whole_model(self) -> bool:
        """Whether every tensor of the model is among them."""
        return len(self._tensors) == len(self._shapes)

    def digest(self) -> str:
        """A hash of all values, whatever the order and the pieces in which they came."""
        digest = hashlib.blake2b(digest_size=12)
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(bytes_of(tensor).data)
        return digest.hexdigest()

    def has(self, name: str) -> bool:
        """Whether this tensor has arrived."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape. Raises ConfigError if it has not arrived."""
        return tuple(self._tensor(name).shape)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements start:stop along `dim`, a view."""
        tensor = self._tensor(name)
        begin, end, _ = slice(start, stop).indices(tensor.shape[dim])
        return tensor.narrow(dim, begin, end - begin)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise ConfigError(f"tensor {name} has not been sent")
        return self._tensors[name]

    def _allocate(self, piece: TensorBytes, name: str) -> torch.Tensor:
        expected = self._shapes.get(name)
        if expected is None:
            raise RequestError(f"the model has no tensor {piece.name!r}", param="named_tensors")
        if tuple(piece.shape) != expected:
            raise RequestError(
                f"tensor {piece.name} has shape {list(piece.shape)}, the model's has {list(expected)}",
                param="named_tensors",
            )
        dtype = _DTYPES.get(piece.dtype)
        if dtype is None:
            raise RequestError(
                f"tensor {piece.name} is of dtype {piece.dtype!r}; send float32, float16 or bfloat16",
                param="named_tensors",
            )
        try:
            return torch.empty(expected, dtype=dtype)
        except (MemoryError, RuntimeError) as error:
            nbytes = math.prod(expected) * dtype.itemsize
            raise RequestError(f"no memory for tensor {piece.name} of {nbytes} bytes: {error}") from error
