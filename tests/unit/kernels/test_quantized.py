"""int8 layers against the same arithmetic in float32, and their distance from what they stand for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.linear import PackedLinear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded_weight(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round() * scale


def rounded_input(x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x.float(), (0, -x.shape[1] % 64)).unflatten(1, (-1, 64))
    scale = padded.abs().amax(2, keepdim=True).clamp(min=1e-30) / 127
    return ((padded / scale).round() * scale).flatten(1)[:, : x.shape[1]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 300),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(instruction_set: str, rows: int, outputs: int, inputs: int, bias: bool, seed: int) -> None:
    weight, x = random(outputs, inputs, seed=seed), random(rows, inputs, seed=seed + 1)
    offset = random(outputs) if bias else None
    expected = rounded_input(x) @ rounded_weight(weight).T + (0 if offset is None else offset.float())
    layer = PackedLinear(weight, offset, quantization="int8")
    # The output's own rounding is up to 2**-8 of it; the sum's is relative to its terms, not to what they cancel to.
    terms = rounded_input(x).norm(dim=1, keepdim=True) * rounded_weight(weight).norm(dim=1)
    assert ((layer(x).float() - expected).abs() <= 2**-8 * expected.abs() + 6e-3 * terms).all()
    assert torch.equal(layer.logits(x), layer(x).float())


def test_a_row_is_the_same_bits_beside_any_number_of_others(instruction_set: str) -> None:
    layer, x = PackedLinear(random(80, 320), quantization="int8"), random(40, 320)
    whole = layer(x)
    for num_rows in (1, 3, 4, 5, 16, 17, 39):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])


def test_gated(instruction_set: str) -> None:
    weight, x = random(2 * 48, 128), random(9, 128)
    gate, up = (rounded_input(x) @ rounded_weight(weight).T).chunk(2, dim=1)
    actual = PackedLinear(weight, gated="silu", quantization="int8")(x).float()
    assert (actual - F.silu(gate) * up).norm() <= 1e-2 * (F.silu(gate) * up).norm()


def test_embedding_rows_are_the_rounded_weight(instruction_set: str) -> None:
    weight = random(50, 70)
    layer = PackedLinear(weight, quantization="int8")
    token_ids = torch.tensor([49, 0, 17])
    torch.testing.assert_close(
        layer.rows(token_ids, None).float(), rounded_weight(weight)[token_ids], rtol=8e-3, atol=1e-6
    )
