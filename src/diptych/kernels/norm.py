"""RMS norms fused with what comes before or after them. Reference: layers/norm.py and layers/rotary.py.

T = tokens, D = size of what is normalised, H = heads.
"""

from __future__ import annotations

import ctypes

import torch

from diptych.kernels.library import DTYPES, kernels
from diptych.kernels.memory import empty


class _Weights(ctypes.Structure):
    """NormWeights of csrc/abi.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("weight_is_float32", ctypes.c_int32),
    )


def can_normalize(weight: torch.Tensor) -> bool:
    """Whether a norm with this weight has a kernel here."""
    return weight.device.type == "cpu" and kernels() is not None


class FusedNorm:
    """An RMS norm over rows [T, D] of `dtype`. weight: [D], in float32 or in `dtype`; it must outlive this object."""

    def __init__(self, weight: torch.Tensor, eps: float, *, dtype: torch.dtype) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded; ask can_normalize first"
        self._library = library
        self._weight = weight
        self._layer = _norm_weights(weight, eps, dtype)
        self.address = ctypes.addressof(self._layer)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """norm(x), new."""
        out = empty((x.shape[0], x.shape[1]), x.dtype)
        self._library.rms_norm(out.data_ptr(), x.data_ptr(), self.address, x.shape[0], out.stride(0), x.stride(0))
        return out

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """hidden += norm(x), in place."""
        self._library.add_normalized(
            hidden.data_ptr(), x.data_ptr(), self.address, x.shape[0], hidden.stride(0), x.stride(0)
        )
        return hidden

    def after_adding(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """hidden += x, in place; then norm(hidden), new."""
        out = empty((x.shape[0], x.shape[1]), x.dtype)
        self._library.add_then_norm(
            out.data_ptr(),
            hidden.data_ptr(),
            x.data_ptr(),
            self.address,
            x.shape[0],
            out.stride(0),
            hidden.stride(0),
            x.stride(0),
        )
        return out


class FusedHeads:
    """Normalises (if there is a weight) and rotates heads in place.

    Args: weight: [H, D], in float32 or in `dtype`, or None; it must outlive this object.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, weight: torch.Tensor | None, eps: float, dtype: torch.dtype
    ) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded; ask can_normalize first"
        self._library = library
        self._num_heads = num_heads
        self._weight = weight
        self._layer = (
            _Weights(size=head_dim, dtype=DTYPES[dtype]) if weight is None else _norm_weights(weight, eps, dtype)
        )
        self.address = ctypes.addressof(self._layer)

    def __call__(self, heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
        """heads: [T, >= H * D], the first H are changed. cos, signed_sin: [T, 1, D], contiguous, in heads' dtype."""
        self._library.norm_and_rotate(
            heads.data_ptr(),
            cos.data_ptr(),
            signed_sin.data_ptr(),
            self.address,
            heads.shape[0],
            self._num_heads,
            heads.stride(0),
        )


def _norm_weights(weight: torch.Tensor, eps: float, dtype: torch.dtype) -> _Weights:
    return _Weights(
        weight=weight.data_ptr(),
        size=weight.shape[-1],
        weight_stride=weight.shape[-1] if weight.dim() == 2 else 0,
        eps=eps,
        dtype=DTYPES[dtype],
        weight_is_float32=weight.dtype == torch.float32,
    )
