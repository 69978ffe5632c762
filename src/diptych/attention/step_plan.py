"""What a step's attention reads, worked out once for all layers that share a window.

Splits a ragged batch into groups of decode rows of similar length and single rows with several queries, and turns
page tables into token rows of the KV pool and masks. Owns no KV and computes no attention.

n = rows of a group, S = keys, Q = queries of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.attention.backend import AttentionInputs

QUERY_BLOCK = 256
"""Queries attended at once in a prefill: a block skips most keys that it cannot see. Measured best on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Rows with one query each, padded to one number of keys.

    tokens: int64 [n], the rows' places in the step; None when the group is the whole step in order. pool_rows: int64
    [n * S], rows of `PoolRows`; padding repeats a row's own last key, so nothing of another sequence is ever read.
    mask: additive, [n, 1, 1, S]; None when no row is padded.
    """

    tokens: torch.Tensor | None
    pool_rows: torch.Tensor
    num_rows: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBlock:
    """Adjacent queries of one row, as token ranges in the step and key ranges within the row's keys."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """A row with several queries. Its keys are those of step tokens `start:stop` when `pool_rows` is None (nothing was
    cached), otherwise rows `pool_rows`, int64 [S], of the pool."""

    start: int
    stop: int
    pool_rows: torch.Tensor | None
    blocks: list[QueryBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step under one window."""

    decode_groups: list[DecodeGroup]
    prefill_rows: list[PrefillRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRows:
    """How (page, offset) becomes a row of one layer's K or V seen as a flat [rows, G * D] matrix."""

    page_size: int
    page_stride: int

    def of(self, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows, int64 [n, S], of token positions int64 [n, S] under page tables int32 [n, pages]."""
        pages = page_table.gather(1, positions // self.page_size).to(torch.int64)
        return pages * self.page_stride + positions % self.page_size


def plan_step(
    inputs: AttentionInputs, window: int | None, *, rows: PoolRows, max_padding: int, dtype: torch.dtype
) -> StepPlan:
    """Split one step into decode groups and prefill rows.

    Args: window: of the layers that will use the plan. max_padding: padded keys that a group may hold before another
    group is cheaper. dtype: of the masks.
    """
    starts = [0]
    for query_len in inputs.query_lens_host:
        starts.append(starts[-1] + query_len)
    decodes = [row for row, query_len in enumerate(inputs.query_lens_host) if query_len == 1]
    visible = [_visible(inputs.kv_lens_host[row], window) for row in decodes]
    groups = [
        _decode_group(inputs, [decodes[index] for index in group], window, starts=starts, rows=rows, dtype=dtype)
        for group in group_by_length(visible, max_padding)
    ]
    prefills = [
        _prefill_row(inputs, row, window, start=starts[row], rows=rows)
        for row, query_len in enumerate(inputs.query_lens_host)
        if query_len > 1
    ]
    return StepPlan(decode_groups=groups, prefill_rows=prefills)


def group_by_length(lengths: Sequence[int], max_padding: int) -> list[list[int]]:
    """Indices of `lengths` in groups whose padding to their longest is at most `max_padding` in all, each in order."""
    groups: list[list[int]] = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        padding += longest - lengths[index]
        if not groups or padding > max_padding:
            groups.append([])
            longest, padding = lengths[index], 0
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def _visible(kv_len: int, window: int | None) -> int:
    return kv_len if window is None else min(kv_len, window)


def _decode_group(
    inputs: AttentionInputs,
    group: list[int],
    window: int | None,
    *,
    starts: list[int],
    rows: PoolRows,
    dtype: torch.dtype,
) -> DecodeGroup:
    lengths = [_visible(inputs.kv_lens_host[row], window) for row in group]
    longest = max(lengths)
    tokens = [starts[row] for row in group]
    first = [inputs.kv_lens_host[row] - length for row, length in zip(group, lengths, strict=True)]
    # One transfer to the device; every small operation here is paid once a group, a window and a step.
    device = inputs.page_table.device
    columns = torch.tensor([group, tokens, first, lengths], device=device).unsqueeze(2)
    offsets = torch.arange(longest, device=device)
    positions = torch.minimum(columns[2] + offsets, columns[2] + columns[3] - 1)
    mask = None
    if min(lengths) != longest:
        is_padding = offsets >= columns[3]
        mask = torch.zeros((len(group), longest), dtype=dtype, device=device).masked_fill_(is_padding, float("-inf"))
        mask = mask.view(len(group), 1, 1, longest)
    return DecodeGroup(
        tokens=None if len(group) == starts[-1] else columns[1, :, 0],
        pool_rows=rows.of(inputs.page_table.index_select(0, columns[0, :, 0]), positions).view(-1),
        num_rows=len(group),
        mask=mask,
    )


def _prefill_row(inputs: AttentionInputs, row: int, window: int | None, *, start: int, rows: PoolRows) -> PrefillRow:
    query_len, kv_len = inputs.query_lens_host[row], inputs.kv_lens_host[row]
    cached = kv_len - query_len
    first_key = 0 if window is None else max(0, cached - window + 1)
    pool_rows = None
    if cached > 0:
        positions = torch.arange(first_key, kv_len, device=inputs.page_table.device).unsqueeze(0)
        pool_rows = rows.of(inputs.page_table[row : row + 1], positions).view(-1)
    blocks = []
    for offset in range(0, query_len, QUERY_BLOCK):
        stop = min(offset + QUERY_BLOCK, query_len)
        oldest = 0 if window is None else max(0, cached + offset - window + 1)
        blocks.append(
            QueryBlock(
                query_start=start + offset,
                query_stop=start + stop,
                key_start=oldest - first_key,
                key_stop=cached + stop - first_key,
            )
        )
    return PrefillRow(start=start, stop=start + query_len, pool_rows=pool_rows, blocks=blocks)
