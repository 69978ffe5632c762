"""What every attention backend must do: exact causal attention for any ragged batch over any scattering of pages.

Each case is compared with a dense float32 computation, query by query, that knows nothing of pages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_problem import LAYER, Problem, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.attention.registry import BACKENDS, create_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def check(name: str, shape: Shape, seed: int = 0) -> None:
    problem = Problem(shape, seed)
    actual = problem.run(create_attention(name, problem.pool))
    assert actual.shape == (*problem.query.shape[:2], shape.value_dim or shape.head_dim)
    assert actual.dtype == shape.dtype
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(actual.float(), problem.expected(), rtol=tolerance, atol=tolerance)


backends = pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if "cpu" in backend.devices])

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 12), (24, 17), (576, 512)])
def test_latent_rows(name: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """One row a token for keys and values of all heads; the last size is DeepSeek's."""
    rows = (*MIXED, (90, 100), (1, 300))
    check(name, Shape(rows, 16, 1, head_dim=sizes[0], value_dim=sizes[1], page_size=16, dtype=dtype))


@backends
def test_latent_rows_are_written_where_the_step_says(name: str) -> None:
    problem = Problem(Shape(MIXED, num_kv_heads=1, value_dim=12))
    before = problem.pool.tensor.clone()
    problem.run(create_attention(name, problem.pool))
    after = problem.pool.tensor
    for row, (query_len, kv_len) in enumerate(problem.shape.rows):
        for position in range(kv_len - query_len, kv_len):
            page, offset = divmod(problem.slot(row, position), problem.shape.page_size)
            assert torch.equal(after[page, LAYER, 0, offset], problem.keys[row][position])
            before[page, LAYER, 0, offset] = after[page, LAYER, 0, offset]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


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
