"""Grouping of decode rows, and which pool rows and masks a plan names."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.attention.backend import AttentionInputs
from diptych.attention.step_plan import QUERY_BLOCK, PoolRows, StepPlan, group_by_length, plan_step

ROWS = PoolRows(page_size=4, page_stride=100)


def plan(
    rows: list[tuple[int, int]], pages: list[list[int]], *, window: int | None = None, padding: int = 8
) -> StepPlan:
    query_lens, kv_lens = [query for query, _ in rows], [kv for _, kv in rows]
    width = max(map(len, pages))
    inputs = AttentionInputs(
        query_starts=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=torch.tensor([row + [-1] * (width - len(row)) for row in pages], dtype=torch.int32),
        kv_slots=torch.zeros(sum(query_lens), dtype=torch.int64),
        query_lens_host=query_lens,
        kv_lens_host=kv_lens,
    )
    return plan_step(inputs, window, rows=ROWS, max_padding=padding, dtype=torch.float32)


@given(lengths=st.lists(st.integers(1, 500), max_size=40), max_padding=st.integers(0, 300))
def test_groups_hold_every_row_once_and_pad_little(lengths: list[int], max_padding: int) -> None:
    groups = group_by_length(lengths, max_padding)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert sum(longest - lengths[index] for index in group) <= max_padding
        assert group == sorted(group)


def test_equal_lengths_are_one_group_without_mask_or_selection() -> None:
    (group,) = plan([(1, 5), (1, 5)], [[7, 2], [0, 9]]).decode_groups
    assert group.mask is None
    assert group.tokens is None
    assert group.pool_rows.tolist() == [700, 701, 702, 703, 200, 0, 1, 2, 3, 900]


def test_padding_repeats_a_rows_own_last_key_and_is_masked() -> None:
    (group,) = plan([(1, 2), (1, 4)], [[7], [3]]).decode_groups
    assert group.pool_rows.view(2, 4).tolist() == [[700, 701, 701, 701], [300, 301, 302, 303]]
    assert group.mask is not None
    assert (group.mask.view(2, 4) == 0).tolist() == [[True, True, False, False], [True] * 4]


def test_a_window_begins_in_the_middle_of_a_page() -> None:
    (group,) = plan([(1, 7)], [[5, 8]], window=5).decode_groups
    assert group.pool_rows.tolist() == [502, 503, 800, 801, 802]


def test_decodes_keep_their_places_among_prefills() -> None:
    step = plan([(1, 3), (2, 6), (1, 3)], [[1], [2, 3], [4]])
    (group,), (row,) = step.decode_groups, step.prefill_rows
    assert group.tokens is not None
    assert group.tokens.tolist() == [0, 3]
    assert (row.start, row.stop) == (1, 3)
    assert row.pool_rows is not None
    assert row.pool_rows.tolist() == [200, 201, 202, 203, 300, 301]


def test_a_prompt_without_cached_tokens_reads_nothing_from_the_pool() -> None:
    (row,) = plan([(6, 6)], [[1, 2]]).prefill_rows
    assert row.pool_rows is None


@pytest.mark.parametrize("window", [None, 3, 300, 10_000])
@pytest.mark.parametrize(("query_len", "kv_len"), [(2, 2), (QUERY_BLOCK, QUERY_BLOCK + 7), (600, 1000), (513, 513)])
def test_blocks_cover_queries_once_and_all_keys_they_see(query_len: int, kv_len: int, window: int | None) -> None:
    cached = kv_len - query_len
    (row,) = plan([(query_len, kv_len)], [list(range(-(-kv_len // 4)))], window=window).prefill_rows
    first_key = 0 if window is None else max(0, cached - window + 1)
    if row.pool_rows is not None:
        assert len(row.pool_rows) == kv_len - first_key
    queries = [query for block in row.blocks for query in range(block.query_start, block.query_stop)]
    assert queries == list(range(query_len))
    for block in row.blocks:
        oldest = cached + block.query_start
        assert block.key_start + first_key == (0 if window is None else max(0, oldest - window + 1))
        assert block.key_stop + first_key == cached + block.query_stop
