"""Attention in plain torch over the paged pool: exact, portable, and the yardstick of every other backend.

Values of a latent pool are the first elements of its keys. Decode rows are gathered in a few padded groups of similar
length, prefill rows one by one in blocks of queries; what a step needs is planned once and shared by its layers. Keeps
no reference to a step beyond the last one.

H = query heads, G = KV heads, R = H / G, D = head_dim, S = keys, n = rows of a group, Q = queries of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diptych.attention.backend import AttentionInputs, AttentionSpec
from diptych.attention.step_plan import QUERY_BLOCK, DecodeGroup, PoolRows, PrefillRow, StepPlan, plan_step
from diptych.kv.pool import KVPool

MAX_PADDING_NBYTES = 512 * 1024
"""K and V of padding that cost about as much to gather and attend over as launching another group does (on a CPU)."""


@dataclass(slots=True)
class _PlannedStep:
    """Plans of the step in progress, by window; `inputs` is held so that identity means the same step."""

    inputs: AttentionInputs | None = None
    by_window: dict[int | None, StepPlan] = field(default_factory=dict)


class ReferenceAttention:
    """An `AttentionBackend` over `pool`. An `AttentionInputs` must not change once a layer has seen it."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        layout = pool.layout
        self.num_kv_heads, self.head_dim = layout.num_kv_heads, layout.head_dim
        self.rows = PoolRows(
            page_size=layout.page_size, page_stride=layout.num_layers * len(layout.parts) * layout.page_size
        )
        self.max_padding = MAX_PADDING_NBYTES // (len(layout.parts) * layout.row_nbytes)
        self._step = _PlannedStep()
        self._causal_masks: dict[int | None, torch.Tensor] = {}

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec
    ) -> torch.Tensor:
        self.pool.write(spec.layer, key, value, inputs.kv_slots)
        key_rows, value_rows = (self._as_rows(view) for view in self.pool.layer(spec.layer))
        plan = self._plan(inputs, spec.window, query.dtype)
        output = query.new_empty((*query.shape[:-1], spec.value_dim or self.head_dim))
        for group in plan.decode_groups:
            self._decode(group, query, output, keys=key_rows, values=value_rows, spec=spec)
        for row in plan.prefill_rows:
            if row.pool_rows is None:
                keys, values = key[row.start : row.stop], value[row.start : row.stop]
            else:
                keys = self._gather(key_rows, row.pool_rows)
                values = self._values(keys, value_rows, row.pool_rows, spec)
            self._prefill(row, query, output, keys=keys, values=values, spec=spec)
        return output

    def _plan(self, inputs: AttentionInputs, window: int | None, dtype: torch.dtype) -> StepPlan:
        """The step's plan under `window`; windows that no row outgrows share the plan without one."""
        if self._step.inputs is not inputs:
            self._step = _PlannedStep(inputs)
        if window is not None and window >= max(inputs.kv_lens_host):
            window = None
        plan = self._step.by_window.get(window)
        if plan is None:
            plan = plan_step(inputs, window, rows=self.rows, max_padding=self.max_padding, dtype=dtype)
            self._step.by_window[window] = plan
        return plan

    def _as_rows(self, view: torch.Tensor) -> torch.Tensor:
        """One layer of K or V, [pages, page_size, G, D] strided by page, as the matrix that `PoolRows` indexes."""
        num_rows = (view.shape[0] - 1) * self.rows.page_stride + self.rows.page_size
        row_size = self.num_kv_heads * self.head_dim
        return view.as_strided((num_rows, row_size), (row_size, 1))

    def _gather(self, rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Keys or values, [S, G, D]."""
        return rows.index_select(0, indices).view(-1, self.num_kv_heads, self.head_dim)

    def _values(
        self, keys: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """The values that go with gathered keys [S, G, D]."""
        return keys[..., : spec.value_dim] if self.pool.layout.is_latent else self._gather(rows, indices)

    def _decode(
        self,
        group: DecodeGroup,
        query: torch.Tensor,
        output: torch.Tensor,
        *,
        keys: torch.Tensor,
        values: torch.Tensor,
        spec: AttentionSpec,
    ) -> None:
        """One query a row. The query heads of a KV head stand in as queries, [n, G, R, D]: nothing is expanded."""
        shape = (group.num_rows, -1, self.num_kv_heads, self.head_dim)
        gathered = self._gather(keys, group.pool_rows)
        gathered_keys = gathered.view(shape).transpose(1, 2)
        values = self._values(gathered, values, group.pool_rows, spec)
        gathered_values = values.unflatten(0, (group.num_rows, -1)).transpose(1, 2)
        queries = query if group.tokens is None else query.index_select(0, group.tokens)
        queries = queries.unflatten(1, (self.num_kv_heads, -1))
        attended = attend(queries, gathered_keys, gathered_values, mask=group.mask, spec=spec).flatten(1, 2)
        if group.tokens is None:
            output.copy_(attended)
        else:
            output.index_copy_(0, group.tokens, attended)

    def _prefill(
        self,
        row: PrefillRow,
        query: torch.Tensor,
        output: torch.Tensor,
        *,
        keys: torch.Tensor,
        values: torch.Tensor,
        spec: AttentionSpec,
    ) -> None:
        """Several queries of one row: G batches of R heads, whose keys are one stride-0 view."""
        num_groups = query.shape[1] // self.num_kv_heads
        expanded = (self.num_kv_heads, num_groups, keys.shape[0], -1)
        keys = keys.transpose(0, 1).unsqueeze(1).expand(expanded)
        values = values.transpose(0, 1).unsqueeze(1).expand(expanded)
        for block in row.blocks:
            queries = query[block.query_start : block.query_stop].unflatten(1, (self.num_kv_heads, -1))
            num_keys = block.key_stop - block.key_start
            attended = attend(
                queries.permute(1, 2, 0, 3),
                keys[:, :, block.key_start : block.key_stop],
                values[:, :, block.key_start : block.key_stop],
                mask=self._causal_mask(queries.shape[0], num_keys, spec.window, like=query),
                spec=spec,
            )
            target = output[block.query_start : block.query_stop].unflatten(1, (self.num_kv_heads, -1))
            target.copy_(attended.permute(2, 0, 1, 3))

    def _causal_mask(self, num_queries: int, num_keys: int, window: int | None, *, like: torch.Tensor) -> torch.Tensor:
        """Additive mask [Q, S], the last query at the last key: a slice of one table for all blocks and steps."""
        num_before = num_keys - num_queries
        table = self._causal_masks.get(window)
        if table is None or table.shape[1] - QUERY_BLOCK < num_before:
            table = banded_mask(_power_of_two(num_before), window, like=like)
            self._causal_masks[window] = table
        start = table.shape[1] - QUERY_BLOCK - num_before
        return table[:num_queries, start : start + num_keys]


def banded_mask(num_before: int, window: int | None, *, like: torch.Tensor) -> torch.Tensor:
    """Additive mask [QUERY_BLOCK, num_before + QUERY_BLOCK]: query i stands at key num_before + i, sees it and
    earlier ones, at most `window` in all."""
    query_positions = torch.arange(num_before, num_before + QUERY_BLOCK, device=like.device).unsqueeze(1)
    key_positions = torch.arange(num_before + QUERY_BLOCK, device=like.device).unsqueeze(0)
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attention of [b, h, Q, D] over keys [b, h, S, D] and values of any width, under an additive mask, softmax in
    float32."""
    if spec.soft_cap is None and query.is_cuda:
        # The fused kernels want masks that begin at 16 bytes; ours begin anywhere in a table.
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scale)
    if spec.soft_cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scale)
    scores = torch.matmul(query.float(), key.float().mT).mul_(spec.scale / spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(torch.softmax(scores, dim=-1), value.float()).to(query.dtype)


def _power_of_two(length: int) -> int:
    """The smallest power of two that is at least `length`."""
    return 1 << max(0, length - 1).bit_length()
