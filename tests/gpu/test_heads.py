"""Rotary tables, and the heads of a fused QKV projection, against the torch layers that they stand in for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from diptych.kernels.cuda.heads import prepare_heads, rotary_table
from diptych.layers.norm import rms_normalize

PAGE_SIZE = 4
EPS = 1e-6


def expected_heads(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    """Heads [T, heads, D] normalised as the layer does, rotated in float32, rounded once."""
    if weight is not None:
        heads = rms_normalize(heads, weight, EPS)
    low, high = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for one rounding here and there."""
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert (actual != expected).sum() <= 2 + 0.02 * actual.numel()


@pytest.mark.parametrize("half", [8, 40, 64])
@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_table_is_accurate_at_any_position(device: torch.device, half: int, magnitude: float) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131_071, 999_999], device=device)
    frequencies = 500_000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    cos, sin = torch.empty(2, 6, half, device=device)
    rotary_table(positions, frequencies, magnitude=magnitude, cos=cos, sin=sin)
    angles = torch.outer(positions.float(), frequencies).double()
    torch.testing.assert_close(cos.double(), angles.cos() * magnitude, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), angles.sin() * magnitude, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weight", ["none", "late", "early"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [
        (1, 4, 1, 16),
        (5, 6, 3, 24),
        (3, 9, 9, 8),
        (515, 2, 1, 8),  # so many that a program takes several tokens
        pytest.param(1, 32, 8, 128, marks=pytest.mark.gpu),
        pytest.param(64, 32, 8, 128, marks=pytest.mark.gpu),
        pytest.param(8191, 32, 8, 128, marks=pytest.mark.gpu),
        pytest.param(777, 8, 4, 256, marks=pytest.mark.gpu),
        pytest.param(777, 14, 2, 64, marks=pytest.mark.gpu),
        pytest.param(100, 32, 32, 96, marks=pytest.mark.gpu),
    ],
)
def test_heads(
    device: torch.device,
    dtype: torch.dtype,
    weight: str,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    width = (num_heads + 2 * num_kv_heads) * head_dim
    projected = torch.randn(num_tokens, width + 16, device=device).to(dtype)[:, :width]
    cos, sin = torch.randn(2, num_tokens, head_dim // 2, device=device)
    norm_weight = None
    if weight != "none":
        norm_weight = torch.randn(num_heads + num_kv_heads, head_dim, device=device)
        norm_weight = norm_weight.to(dtype) if weight == "late" else norm_weight
    num_pages = num_tokens // PAGE_SIZE + 2
    pool = torch.zeros(num_pages, 3, 2, PAGE_SIZE, num_kv_heads, head_dim, dtype=dtype, device=device)
    kv_slots = torch.randperm(num_pages * PAGE_SIZE, device=device)[:num_tokens]
    kv_slots[num_tokens // 2 + 1 :: 3] = -1
    query, key, value = projected.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    queries_and_keys = torch.cat((query, key), dim=1)
    expected = expected_heads(queries_and_keys, cos, sin, norm_weight)
    untouched = projected[:, num_heads * head_dim :].clone()
    prepare_heads(
        projected,
        cos,
        sin,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_cache=pool[:, 1, 0],
        value_cache=pool[:, 1, 1],
        kv_slots=kv_slots,
        norm_weight=norm_weight,
        eps=EPS,
    )
    assert_same(query, expected[:, :num_heads])
    assert torch.equal(projected[:, num_heads * head_dim :], untouched)
    is_written = kv_slots >= 0
    cache = pool[:, 1].movedim(1, 2).flatten(0, 1)
    written = cache[kv_slots[is_written]]  # [tokens, 2, G, D]
    assert_same(written[:, 0], expected[is_written, num_heads:])
    assert torch.equal(written[:, 1], value[is_written])
    cache[kv_slots[is_written]] = 0
    assert not cache.any()
    assert not pool[:, (0, 2)].any()
