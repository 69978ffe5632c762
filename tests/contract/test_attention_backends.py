"""What every attention backend must do: exact causal attention for any ragged batch over any scattering of pages.

Each case is compared with a dense float32 computation, query by query, that knows nothing of pages.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec
from diptych.attention.registry import BACKENDS, create_attention
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
LAYERS = 3
LAYER = 1


@dataclass(frozen=True)
class Shape:
    """One problem. rows: (tokens in this step, tokens with this step's) of every sequence."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32


class Problem:
    """Random tokens of a shape, in a pool whose every other place holds NaN: reading it would show."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(shape.dtype)

        self.keys = [random(kv_len, shape.num_kv_heads, shape.head_dim) for _, kv_len in shape.rows]
        self.values = [random(kv_len, shape.num_kv_heads, shape.head_dim) for _, kv_len in shape.rows]
        self.query = random(sum(query_len for query_len, _ in shape.rows), shape.num_heads, shape.head_dim)
        num_pages = [-(-kv_len // shape.page_size) for _, kv_len in shape.rows]
        order = torch.randperm(sum(num_pages) + 3, generator=generator).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in num_pages]
        self.pool = self._filled_pool(sum(num_pages) + 3)
        self.inputs = self._inputs()
        self.spec = AttentionSpec(layer=LAYER, scale=shape.head_dim**-0.5, window=shape.window, soft_cap=shape.soft_cap)

    def slot(self, row: int, position: int) -> int:
        return self.pages[row][position // self.shape.page_size] * self.shape.page_size + (
            position % self.shape.page_size
        )

    def _filled_pool(self, num_pages: int) -> KVPool:
        shape = self.shape
        layout = KVLayout.single_rank(
            LAYERS,
            shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            dtype=str(shape.dtype).removeprefix("torch."),
        )
        pool = KVPool(layout, num_pages, CPU, shape.dtype)
        pool.tensor.fill_(float("nan"))
        for row, (query_len, kv_len) in enumerate(shape.rows):
            slots = torch.tensor(
                [self.slot(row, position) for position in range(kv_len - query_len)], dtype=torch.int64
            )
            cached = kv_len - query_len
            pool.write(LAYER, self.keys[row][:cached], self.values[row][:cached], slots)
        return pool

    def decode_step(self) -> Problem:
        """The same sequences in the same pool, a step in which only the last token of each is computed (again)."""
        step = copy.copy(self)
        step.shape = replace(self.shape, rows=tuple((1, kv_len) for _, kv_len in self.shape.rows))
        step.query = self.query[: len(step.shape.rows)] * 0.5
        step.inputs = step._inputs()
        return step

    def _inputs(self) -> AttentionInputs:
        max_pages = max(map(len, self.pages))
        query_lens = [query_len for query_len, _ in self.shape.rows]
        kv_lens = [kv_len for _, kv_len in self.shape.rows]
        undefined = 2**31 - 1
        table = [pages + [undefined] * (max_pages - len(pages)) for pages in self.pages]
        slots = [
            self.slot(row, position)
            for row, (query_len, kv_len) in enumerate(self.shape.rows)
            for position in range(kv_len - query_len, kv_len)
        ]
        return AttentionInputs(
            query_starts=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=torch.tensor(table, dtype=torch.int32),
            kv_slots=torch.tensor(slots),
            query_lens_host=query_lens,
            kv_lens_host=kv_lens,
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """The backend's output; K and V are strided, as slices of a fused projection are."""
        new = [slice(kv_len - query_len, kv_len) for query_len, kv_len in self.shape.rows]
        key = torch.cat([keys[part] for keys, part in zip(self.keys, new, strict=True)])
        value = torch.cat([values[part] for values, part in zip(self.values, new, strict=True)])
        fused = torch.cat((self.query, key, value), dim=1)
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        return backend.forward(*fused.split((heads, kv_heads, kv_heads), dim=1), self.inputs, self.spec)

    def expected(self) -> torch.Tensor:
        """Float32, one query and one head at a time."""
        outputs = []
        queries = iter(self.query.float())
        for row, (query_len, kv_len) in enumerate(self.shape.rows):
            for position in range(kv_len - query_len, kv_len):
                first = 0 if self.shape.window is None else max(0, position - self.shape.window + 1)
                outputs.append(self._attend(next(queries), row, slice(first, position + 1)))
        return torch.stack(outputs)

    def _attend(self, query: torch.Tensor, row: int, seen: slice) -> torch.Tensor:
        heads = []
        for head in range(self.shape.num_heads):
            kv_head = head * self.shape.num_kv_heads // self.shape.num_heads
            scores = self.keys[row][seen, kv_head].float() @ query[head] * self.spec.scale
            if self.shape.soft_cap is not None:
                scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
            heads.append(torch.softmax(scores, 0) @ self.values[row][seen, kv_head].float())
        return torch.stack(heads)


def check(name: str, shape: Shape, seed: int = 0) -> None:
    problem = Problem(shape, seed)
    actual = problem.run(create_attention(name, problem.pool))
    assert actual.shape == problem.query.shape
    assert actual.dtype == shape.dtype
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(actual.float(), problem.expected(), rtol=tolerance, atol=tolerance)


backends = pytest.mark.parametrize("name", sorted(BACKENDS))

MIXED = ((1, 1), (1, 37), (5, 5), (3, 20), (1, 9), (1, 64), (11, 12))


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
def test_mixed_batches(name: str, window: int | None, soft_cap: float | None, dtype: torch.dtype) -> None:
    check(name, Shape(MIXED, window=window, soft_cap=soft_cap, dtype=dtype))


@backends
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (1, 1), (8, 4)])
def test_head_ratios(name: str, heads: tuple[int, int]) -> None:
    check(name, Shape(MIXED, num_heads=heads[0], num_kv_heads=heads[1], window=10))


@backends
@pytest.mark.parametrize("window", [None, 50, 300])
@pytest.mark.parametrize("rows", [((600, 600),), ((270, 300), (1, 300)), ((256, 513),)])
def test_prompts_of_hundreds_of_tokens(name: str, rows: tuple[tuple[int, int], ...], window: int | None) -> None:
    check(name, Shape(rows, num_heads=2, num_kv_heads=1, window=window, page_size=16))


@backends
def test_decodes_of_very_different_lengths(name: str) -> None:
    check(name, Shape(tuple((1, kv_len) for kv_len in (3, 900, 5, 1, 450, 890, 17, 2)), head_dim=64, page_size=16))


@backends
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ragged_batch(name: str, data: st.DataObject) -> None:
    row = st.tuples(st.integers(1, 12), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    decode = st.integers(1, 40).map(lambda kv_len: (1, kv_len))
    num_kv_heads = data.draw(st.integers(1, 3))
    shape = Shape(
        rows=tuple(data.draw(st.lists(st.one_of(row, decode), min_size=1, max_size=7))),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * data.draw(st.integers(1, 4)),
        head_dim=data.draw(st.sampled_from([8, 24])),
        page_size=data.draw(st.sampled_from([1, 2, 5, 16])),
        window=data.draw(st.one_of(st.none(), st.integers(1, 40))),
        soft_cap=data.draw(st.sampled_from([None, 3.0])),
    )
    check(name, shape, seed=data.draw(st.integers(0, 1000)))


@backends
def test_one_backend_serves_windows_and_steps_in_any_order(name: str) -> None:
    """What is kept between calls must not leak from one window or step into another."""
    problem = Problem(Shape(MIXED))
    backend = create_attention(name, problem.pool)
    later = problem.decode_step()
    for window in (None, 5, None, 7):
        for step in (problem, later):
            step.shape = replace(step.shape, window=window)
            step.spec = replace(step.spec, window=window)
            torch.testing.assert_close(step.run(backend), step.expected(), rtol=2e-5, atol=2e-5)


@backends
def test_keys_and_values_are_written_where_the_step_says_and_nowhere_else(name: str) -> None:
    problem = Problem(Shape(MIXED))
    before = problem.pool.tensor.clone()
    problem.run(create_attention(name, problem.pool))
    after = problem.pool.tensor
    for row, (query_len, kv_len) in enumerate(problem.shape.rows):
        for position in range(kv_len - query_len, kv_len):
            page, offset = divmod(problem.slot(row, position), problem.shape.page_size)
            assert torch.equal(after[page, LAYER, 0, offset], problem.keys[row][position])
            assert torch.equal(after[page, LAYER, 1, offset], problem.values[row][position])
            before[page, LAYER, :, offset] = after[page, LAYER, :, offset]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
