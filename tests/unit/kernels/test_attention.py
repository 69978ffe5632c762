"""Paged attention beyond the contract suite: tile shapes, splits of long contexts, invariance to the batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.attention import PagedAttention, StepShape


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (queries, keys) of each sequence, the queries being its last tokens."""

    rows: tuple[tuple[int, int], ...]
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    window: int | None
    soft_cap: float | None
    dtype: torch.dtype = torch.bfloat16


class Problem:
    """A case with random tensors; unwritten places of the pool hold NaN."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        torch.manual_seed(seed)
        self.keys = [torch.randn(kv_len, case.kv_heads, case.head_dim).to(case.dtype) for _, kv_len in case.rows]
        self.values = [torch.randn_like(keys) for keys in self.keys]
        self.queries = [
            torch.randn(num, case.kv_heads * case.group, case.head_dim).to(case.dtype) for num, _ in case.rows
        ]

    def run(self, rows: list[int]) -> list[torch.Tensor]:
        """Outputs of some of the sequences, computed in one step."""
        case = self.case
        num_pages = [-(-case.rows[row][1] // case.page_size) for row in rows]
        pages = torch.randperm(sum(num_pages) + 1)[:-1].to(torch.int32).split(num_pages)
        pool = torch.full((sum(num_pages) + 1, 2, case.page_size, case.kv_heads, case.head_dim), float("nan")).to(
            case.dtype
        )
        slots = []
        for row, own in zip(rows, pages, strict=True):
            num_queries, kv_len = case.rows[row]
            positions = torch.arange(kv_len)
            own_slots = own[positions // case.page_size].long() * case.page_size + positions % case.page_size
            cached = own_slots[: kv_len - num_queries]
            pool[cached // case.page_size, 0, cached % case.page_size] = self.keys[row][: len(cached)]
            pool[cached // case.page_size, 1, cached % case.page_size] = self.values[row][: len(cached)]
            slots.append(own_slots[kv_len - num_queries :])
        table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True, padding_value=2**30).to(torch.int32)
        lens = [case.rows[row][0] for row in rows]
        shape = StepShape.of(
            query_starts=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
            kv_lens=torch.tensor([case.rows[row][1] for row in rows], dtype=torch.int32),
            page_table=table,
            kv_slots=torch.cat(slots),
        )
        attention = PagedAttention(
            pool[:, 0],
            pool[:, 1],
            num_heads=case.kv_heads * case.group,
            scale=case.head_dim**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
        )
        new = [slice(case.rows[row][1] - case.rows[row][0], None) for row in rows]
        key = torch.cat([self.keys[row][part] for row, part in zip(rows, new, strict=True)])
        value = torch.cat([self.values[row][part] for row, part in zip(rows, new, strict=True)])
        output = attention(torch.cat([self.queries[row] for row in rows]), key, value, shape)
        return list(output.split(lens))

    def expected(self, row: int) -> torch.Tensor:
        """Dense, in float32."""
        case = self.case
        num_queries, kv_len = case.rows[row]
        query = self.queries[row].float().unflatten(1, (case.kv_heads, case.group))
        scores = torch.einsum("qgrd,kgd->grqk", query, self.keys[row].float()) * case.head_dim**-0.5
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        at = torch.arange(kv_len - num_queries, kv_len)[:, None]
        keys = torch.arange(kv_len)[None]
        hidden = (keys > at) | (keys <= at - (case.window or kv_len))
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("grqk,kgd->qgrd", weights, self.values[row].float()).flatten(1, 2)


row_shapes = st.tuples(st.sampled_from([1, 1, 1, 2, 5, 33, 70]), st.sampled_from([0, 0, 3, 16, 250, 600])).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)
cases = st.builds(
    Case,
    rows=st.lists(row_shapes, min_size=1, max_size=4).map(tuple),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4, 8, 17]),
    head_dim=st.sampled_from([24, 32, 64, 96]),
    page_size=st.sampled_from([3, 16, 32]),
    window=st.sampled_from([None, 1, 17, 300]),
    soft_cap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases, seed=st.integers(0, 99))
def test_any_case(instruction_set: str, case: Case, seed: int) -> None:
    problem = Problem(case, seed)
    for row, actual in enumerate(problem.run(list(range(len(case.rows))))):
        expected = problem.expected(row)
        tolerance = 2e-5 if case.dtype == torch.float32 else 8e-3
        assert (actual.float() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("head_dim", [24, 64])
def test_a_row_is_the_same_bits_in_any_batch(instruction_set: str, head_dim: int) -> None:
    rows = ((1, 1200), (1, 7), (20, 300), (1, 513), (1, 512))
    case = Case(rows=rows, kv_heads=1, group=4, head_dim=head_dim, page_size=16, window=None, soft_cap=None)
    problem = Problem(case, seed=0)
    together = problem.run([0, 1, 2, 3, 4])
    backwards = problem.run([4, 3, 2, 1, 0])[::-1]
    for row in range(len(rows)):
        assert torch.equal(problem.run([row])[0], together[row])
        assert torch.equal(backwards[row], together[row])
