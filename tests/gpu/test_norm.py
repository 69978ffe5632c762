"""Fused norms against the torch layers that they stand in for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from diptych.kernels.cuda.norm import add_norm, add_rms_norm, rms_norm
from diptych.layers.norm import rms_normalize

EPS = 1e-5

shapes = pytest.mark.parametrize(
    ("num_tokens", "size"),
    [
        (1, 64),
        (3, 100),
        (2, 640),
        pytest.param(1, 4096, marks=pytest.mark.gpu),
        pytest.param(64, 2560, marks=pytest.mark.gpu),
        pytest.param(8192, 4096, marks=pytest.mark.gpu),
        pytest.param(3, 16384, marks=pytest.mark.gpu),
    ],
)
late_or_early = pytest.mark.parametrize("late_weight", [True, False])  # in the model's dtype or in float32


def random(num_tokens: int, size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers in rows that are not adjacent."""
    return torch.randn(num_tokens, size + 16, device=device).to(dtype)[:, :size]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for one rounding here and there: sums are taken in another order."""
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2)
    assert (actual != expected).sum() <= 2 + 0.02 * actual.numel()


@shapes
@late_or_early
def test_rms_norm(device: torch.device, num_tokens: int, size: int, dtype: torch.dtype, late_weight: bool) -> None:
    x = random(num_tokens, size, device, dtype)
    weight = torch.randn(size, device=device).to(dtype if late_weight else torch.float32)
    out = random(num_tokens, size, device, dtype)
    rms_norm(x, weight, eps=EPS, out=out)
    assert_same(out, rms_normalize(x, weight, EPS))


@shapes
@late_or_early
@pytest.mark.parametrize("normalizes_delta", [False, True])
def test_add_rms_norm(
    device: torch.device, num_tokens: int, size: int, dtype: torch.dtype, late_weight: bool, normalizes_delta: bool
) -> None:
    hidden, delta = random(num_tokens, size, device, dtype), random(num_tokens, size, device, dtype)
    weight, other = torch.randn(2, size, device=device).to(dtype if late_weight else torch.float32)
    delta_weight = other if normalizes_delta else None
    expected = hidden + (delta if delta_weight is None else rms_normalize(delta, delta_weight, EPS))
    out = torch.empty(num_tokens, size, dtype=dtype, device=device)
    add_rms_norm(hidden, delta, weight, eps=EPS, out=out, delta_weight=delta_weight)
    if delta_weight is None:
        assert torch.equal(hidden, expected)
    assert_same(hidden, expected)
    assert_same(out, rms_normalize(hidden, weight, EPS))


@shapes
@late_or_early
def test_add_norm(device: torch.device, num_tokens: int, size: int, dtype: torch.dtype, late_weight: bool) -> None:
    hidden, delta = random(num_tokens, size, device, dtype), random(num_tokens, size, device, dtype)
    weight = torch.randn(size, device=device).to(dtype if late_weight else torch.float32)
    expected = hidden + rms_normalize(delta, weight, EPS)
    add_norm(hidden, delta, weight, eps=EPS)
    assert_same(hidden, expected)


def test_output_may_be_an_input(device: torch.device, dtype: torch.dtype) -> None:
    hidden, delta = random(4, 128, device, dtype), random(4, 128, device, dtype)
    weight = torch.randn(128, device=device).to(dtype)
    expected = rms_normalize(hidden + delta, weight, EPS)
    add_rms_norm(hidden, delta, weight, eps=EPS, out=delta)
    assert_same(delta, expected)
