"""Attention on a CUDA device: FlashInfer for rows with several queries, our own kernel for decode rows.

Decode rows need no plan on the host, so a CUDA graph may hold them; FlashInfer's plan for the others is made once a
step and kind of layer. The only module that imports flashinfer. Worker's thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray

from diptych.attention.backend import AttentionInputs, AttentionSpec
from diptych.errors import ConfigError
from diptych.kernels.cuda.decode_attention import DecodeWorkspace, decode_attention, decode_workspace, plan_decode
from diptych.kv.pool import KVPool

WORKSPACE_NBYTES = 256 << 20
MAX_DECODE_ROWS = 4096
PLANS_IN_FLIGHT = 4
"""A plan lies in pinned memory until the device has read it: so many steps may be queued before one is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Rows of one query each, all on the device. table: int32 [slots, max pages]. rows: int32 [B], each row's line in
    it. kv_lens: int32 [B], this step's token included; 0 for padding, whose output is zero.
    """

    table: torch.Tensor
    rows: torch.Tensor
    kv_lens: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRows:
    """Rows of any number of queries. query_lens, kv_lens: int32 [B] on the host. pages: int32, on the device, the pages
    of all rows one after the other.
    """

    query_lens: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    pages: torch.Tensor


@dataclass(slots=True, eq=False)
class StepAttention:
    """One step's attention: the first tokens are decode rows, the rest prefill rows. Call it once a layer."""

    backend: FlashInferAttention
    decodes: DecodeRows | None
    prefills: PrefillRows | None
    _wrappers: dict[tuple[int | None, float | None], flashinfer.BatchPrefillWithPagedKVCacheWrapper] = field(
        default_factory=dict
    )
    _planned: set[int | None] = field(default_factory=set)

    def __call__(self, query: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Attention output [T, H, D] for query [T, H, D]; the step's K and V are in the pool already."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_decodes = 0 if self.decodes is None else self.decodes.kv_lens.shape[0]
        if self.decodes is not None:
            self._decode(self.decodes, query[:num_decodes], output[:num_decodes], spec)
        if self.prefills is not None:
            self._prefill(self.prefills, query[num_decodes:], output[num_decodes:], spec)
        return output

    def _decode(self, decodes: DecodeRows, query: torch.Tensor, output: torch.Tensor, spec: AttentionSpec) -> None:
        keys, values = self.backend.pool.layer(spec.layer)
        workspace = self.backend.decode_workspace(query, spec.window)
        is_planned = spec.window in self._planned
        if not is_planned:
            plan_decode(decodes.kv_lens, workspace, window=spec.window)
            self._planned.add(spec.window)
        decode_attention(
            query,
            keys,
            values,
            page_table=decodes.table,
            table_rows=decodes.rows,
            kv_lens=decodes.kv_lens,
            out=output,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            workspace=workspace,
            plan_is_settled=is_planned,  # by a kernel that more than one has followed
        )

    def _prefill(self, prefills: PrefillRows, query: torch.Tensor, output: torch.Tensor, spec: AttentionSpec) -> None:
        key = (spec.window, spec.soft_cap)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self.backend.plan_prefill(prefills, query, spec)
        wrapper.run(query.contiguous(), self.backend.pool.layer(spec.layer), out=output)


class FlashInferAttention:
    """An `AttentionBackend` over `pool`. Raises: ConfigError if the pool is not on a CUDA device in 16 bits."""

    def __init__(self, pool: KVPool) -> None:
        tensor = pool.tensor
        if tensor.device.type != "cuda" or tensor.element_size() != 2:
            raise ConfigError(
                f"attention backend 'flashinfer' needs a CUDA device and 16-bit KV, got {tensor.dtype} on "
                f"{tensor.device}; use 'auto' or 'reference'"
            )
        self.pool = pool
        self._workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=tensor.device)
        self._wrappers: dict[
            tuple[int | None, float | None], deque[flashinfer.BatchPrefillWithPagedKVCacheWrapper]
        ] = {}
        self._decode_workspaces: dict[int | None, DecodeWorkspace] = {}
        self._step: tuple[AttentionInputs, StepAttention] | None = None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec
    ) -> torch.Tensor:
        self.pool.write(spec.layer, key, value, inputs.kv_slots)
        if self._step is None or self._step[0] is not inputs:
            self._step = (inputs, StepAttention(self, None, _prefill_rows(inputs, self.pool.layout.page_size)))
        return self._step[1](query, spec)

    def decode_workspace(self, query: torch.Tensor, window: int | None) -> DecodeWorkspace:
        """Where the decode rows of a step are split over the device; layers of one window share it."""
        workspace = self._decode_workspaces.get(window)
        if workspace is None:
            workspace = self._decode_workspaces[window] = decode_workspace(
                MAX_DECODE_ROWS,
                num_heads=query.shape[1],
                num_kv_heads=self.pool.layout.num_kv_heads,
                head_dim=query.shape[2],
                device=query.device,
            )
        return workspace

    def plan_prefill(
        self, prefills: PrefillRows, query: torch.Tensor, spec: AttentionSpec
    ) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
        """A planned wrapper for one step and kind of layer; the kind's wrappers are used in turn."""
        wrapper = self._next_wrapper((spec.window, spec.soft_cap))
        page_size = self.pool.layout.page_size
        num_pages = -(-prefills.kv_lens // page_size)
        wrapper.plan(
            _starts(prefills.query_lens),
            _starts(num_pages),
            prefills.pages,
            _pinned(prefills.kv_lens - (num_pages - 1) * page_size),
            query.shape[1],
            self.pool.layout.num_kv_heads,
            query.shape[2],
            page_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.soft_cap,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
            seq_lens=_pinned(prefills.kv_lens),
        )
        return wrapper

    def _next_wrapper(self, key: tuple[int | None, float | None]) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
        ring = self._wrappers.setdefault(key, deque())
        if len(ring) < PLANS_IN_FLIGHT:
            ring.append(flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="auto"))
        ring.rotate(1)
        return ring[0]


def _starts(lens: NDArray[np.int32]) -> torch.Tensor:
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=starts[1:])
    return _pinned(starts)


def _pinned(array: NDArray[np.int32]) -> torch.Tensor:
    """On the host, in memory from which a copy to the device does not wait for the device."""
    return torch.from_numpy(array).pin_memory()


def _prefill_rows(inputs: AttentionInputs, page_size: int) -> PrefillRows:
    kv_lens = np.asarray(inputs.kv_lens_host, dtype=np.int32)
    num_pages = -(-kv_lens // page_size)
    pages = torch.cat([inputs.page_table[row, :count] for row, count in enumerate(num_pages.tolist())])
    return PrefillRows(query_lens=np.asarray(inputs.query_lens_host, dtype=np.int32), kv_lens=kv_lens, pages=pages)
