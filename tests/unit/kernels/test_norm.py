"""Fused norms and rotations against the torch layers that they stand in for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.norm import FusedHeads, FusedNorm
from diptych.layers.norm import rms_normalize
from diptych.layers.rotary import RotaryEmbedding, rotate

any_shape = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding here and there: sums are taken in another order."""
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert (actual != expected).sum() <= 2 + 0.02 * actual.numel()  # a norm that rounds the other way turns a pair


@dtypes
@pytest.mark.parametrize("late_weight", [False, True])
@any_shape
@given(rows=st.integers(1, 60), size=st.integers(1, 700), seed=st.integers(0, 99))
def test_norms(instruction_set: str, dtype: torch.dtype, late_weight: bool, rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, hidden = torch.randn(rows, size + 3).to(dtype)[:, :size], torch.randn(rows, size).to(dtype)
    weight = torch.randn(size).to(dtype if late_weight else torch.float32)
    norm = FusedNorm(weight, 1e-6, dtype=dtype)
    assert_same(norm(x), rms_normalize(x, weight, 1e-6))
    assert_same(norm.add_to(hidden.clone(), x), hidden + rms_normalize(x, weight, 1e-6))
    stream = hidden.clone()
    assert_same(norm.after_adding(stream, x), rms_normalize(hidden + x, weight, 1e-6))
    assert torch.equal(stream, hidden + x)


@dtypes
@pytest.mark.parametrize("has_norm", [False, True])
@any_shape
@given(tokens=st.integers(1, 40), heads=st.integers(1, 6), half=st.integers(1, 130), seed=st.integers(0, 99))
def test_heads(
    instruction_set: str, dtype: torch.dtype, has_norm: bool, tokens: int, heads: int, half: int, seed: int
) -> None:
    torch.manual_seed(seed)
    size = 2 * half
    rotary = RotaryEmbedding(torch.rand(half), 1.25, dtype=dtype, device="cpu")
    rotation = rotary(torch.randint(0, 3000, (tokens,)))
    projected = torch.randn(tokens, heads * size + 5).to(dtype)
    weight = torch.randn(heads, size) if has_norm else None
    expected = projected[:, : heads * size].unflatten(1, (heads, size))
    expected = rotate(expected if weight is None else rms_normalize(expected, weight, 1e-6), rotation)
    untouched = projected[:, heads * size :].clone()
    FusedHeads(heads, size, weight=weight, eps=1e-6, dtype=dtype)(projected, *rotation)
    assert_same(projected[:, : heads * size].unflatten(1, (heads, size)), expected)
    assert torch.equal(projected[:, heads * size :], untouched)
