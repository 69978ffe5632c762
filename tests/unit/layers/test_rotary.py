"""Rotation against complex multiplication, its invariants, and its rounding."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.layers.rotary import RotaryEmbedding, rotate


def embedding(head_dim: int, magnitude: float = 1.0, dtype: torch.dtype = torch.float32) -> RotaryEmbedding:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    return RotaryEmbedding(frequencies, magnitude, dtype=dtype, device="cpu")


@given(positions=st.lists(st.integers(0, 4000), min_size=1, max_size=6), head_dim=st.sampled_from([2, 8, 64]))
@settings(max_examples=25, deadline=None)
def test_rotation_is_complex_multiplication(positions: list[int], head_dim: int) -> None:
    rotary = embedding(head_dim, magnitude=1.25)
    heads = torch.randn(len(positions), 3, head_dim)
    angles = torch.outer(torch.tensor(positions, dtype=torch.float32), rotary.inverse_frequencies).unsqueeze(1)
    pairs = torch.complex(heads[..., : head_dim // 2], heads[..., head_dim // 2 :])
    turned = pairs * torch.polar(torch.full_like(angles, 1.25), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotate(heads, rotary(torch.tensor(positions))), expected, rtol=1e-4, atol=1e-5)


def test_scores_depend_on_the_distance_only() -> None:
    rotary = embedding(64)
    query, key = torch.randn(2, 1, 1, 64)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        at = [rotate(x, rotary(torch.tensor([p]))) for x, p in ((query, query_position), (key, key_position))]
        return (at[0] * at[1]).sum()

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-4, atol=1e-4)
    assert (score(7, 3) - score(8, 3)).abs() > 1e-3


def test_position_zero_changes_nothing_and_heads_are_not_written() -> None:
    heads = torch.randn(1, 2, 8)
    before = heads.clone()
    torch.testing.assert_close(rotate(heads, embedding(8)(torch.tensor([0]))), before)
    rotate(heads, embedding(8)(torch.tensor([5])))
    assert torch.equal(heads, before)


def test_bfloat16_rounds_every_product() -> None:
    positions = torch.arange(50)
    heads = torch.randn(50, 2, 16).bfloat16()
    angles = torch.outer(positions.float(), embedding(16).inverse_frequencies)
    cos, sin = (torch.cat((x, x), -1).bfloat16().unsqueeze(1) for x in (angles.cos(), angles.sin()))
    half_turned = torch.cat((-heads[..., 8:], heads[..., :8]), dim=-1)
    expected = heads * cos + half_turned * sin
    assert torch.equal(rotate(heads, embedding(16, dtype=torch.bfloat16)(positions)), expected)


def test_built_on_meta_it_takes_no_memory() -> None:
    rotary = RotaryEmbedding(torch.ones(4), dtype=torch.float32, device="meta")
    assert rotary.inverse_frequencies.is_meta
