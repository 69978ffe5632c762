"""Paged attention over the page-major pool, K and V written in the same call. Reference: attention/reference.py.

T = tokens of the step, H = query heads, G = KV heads, D = head_dim.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from diptych.kernels.library import DTYPES, kernels
from diptych.kernels.memory import empty_rows


class _Layer(ctypes.Structure):
    """AttentionLayer of csrc/abi.h."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """AttentionStep of csrc/abi.h."""

    _fields_ = (
        ("query_starts", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("kv_slots", ctypes.c_void_p),
        ("page_table_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("wanted", ctypes.c_void_p),
        ("num_wanted", ctypes.c_int64),
    )


class _Tensors(ctypes.Structure):
    """AttentionTensors of csrc/abi.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """One step's ragged shape, ready to pass; holds the tensors that it points into."""

    tensors: tuple[torch.Tensor, ...]
    step: _Step
    address: int

    @classmethod
    def of(
        cls,
        *,
        query_starts: torch.Tensor,
        kv_lens: torch.Tensor,
        page_table: torch.Tensor,
        kv_slots: torch.Tensor,
    ) -> StepShape:
        """Shape of a step: int32 [B + 1], int32 [B], int32 [B, pages] and int64 [T], on the CPU, rows contiguous."""
        step = _Step(
            query_starts=query_starts.data_ptr(),
            kv_lens=kv_lens.data_ptr(),
            page_table=page_table.data_ptr(),
            kv_slots=kv_slots.data_ptr(),
            page_table_stride=page_table.stride(0),
            num_rows=kv_lens.shape[0],
            num_tokens=kv_slots.shape[0],
        )
        held = (query_starts, kv_lens, page_table, kv_slots)
        return cls(tensors=held, step=step, address=ctypes.addressof(step))

    def only(self, wanted: torch.Tensor) -> StepShape:
        """The same step, of which only some tokens' results matter: int64 [R], ascending."""
        step = _Step.from_buffer_copy(self.step)
        # No tokens are not all of them: an empty tensor's address is null, any other will do.
        step.wanted, step.num_wanted = wanted.data_ptr() or self.step.kv_slots, len(wanted)
        return StepShape(tensors=(*self.tensors, wanted), step=step, address=ctypes.addressof(step))


class PagedAttention:
    """One layer's attention over its part of the pool.

    Args: keys, values: the layer's views of the pool, [pages, page_size, G, D], contiguous within a page; they must
    outlive this object. num_heads: H. window, soft_cap: as in AttentionSpec.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        num_heads: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded"
        self._library = library
        self._held = (keys, values)
        self._num_heads, self._head_dim = num_heads, keys.shape[3]
        self._layer = _Layer(
            pool=keys.data_ptr(),
            page_stride=keys.stride(0),
            value_offset=(values.data_ptr() - keys.data_ptr()) // keys.itemsize,
            page_size=keys.shape[1],
            num_heads=num_heads,
            num_kv_heads=keys.shape[2],
            head_dim=keys.shape[3],
            dtype=DTYPES[keys.dtype],
            window=window or 0,
            scale=scale,
            soft_cap=soft_cap or 0.0,
        )
        self._tensors = _Tensors()
        self.address, self._tensors_address = ctypes.addressof(self._layer), ctypes.addressof(self._tensors)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """Output [T, H, D]; query [T, H, D], key and value [T, G, D], each token's heads adjacent."""
        num_tokens = query.shape[0]
        rows = empty_rows(num_tokens, self._num_heads * self._head_dim, query.dtype)
        tensors = self._tensors
        tensors.query, tensors.query_stride = query.data_ptr(), query.stride(0)
        tensors.key, tensors.key_stride = key.data_ptr(), key.stride(0)
        tensors.value, tensors.value_stride = value.data_ptr(), value.stride(0)
        tensors.output, tensors.output_stride = rows.data_ptr(), rows.stride(0)
        self._library.attention(self.address, shape.address, self._tensors_address)
        return rows.view(num_tokens, self._num_heads, self._head_dim)
