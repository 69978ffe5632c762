"""int8 layers against the same arithmetic in float64: only the weights are rounded, so little is left to tolerate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.linear import PackedLinear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded_weight(weight: torch.Tensor) -> torch.Tensor:
    """What the layer computes with, float64."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().double() * scale


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
    rounded = rounded_weight(weight)
    expected = x.double() @ rounded.T + (0 if offset is None else offset.double())
    layer = PackedLinear(weight, offset, quantization="int8")
    # Half a unit of bfloat16 for the output; the sum's own error is relative to its terms, not to what they cancel to.
    terms = x.double().abs() @ rounded.abs().T
    assert ((layer(x).double() - expected).abs() <= 2**-8 * expected.abs() + inputs * 2**-24 * terms + 1e-30).all()
    assert torch.equal(layer.logits(x), layer(x).float())


def test_a_row_is_the_same_bits_beside_any_number_of_others(instruction_set: str) -> None:
    layer, x = PackedLinear(random(80, 320), quantization="int8"), random(40, 320)
    whole = layer(x)
    for num_rows in (1, 2, 3, 4, 5, 16, 17, 39):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])


def test_every_byte_is_a_weight(instruction_set: str) -> None:
    """All values from -127 to 127, in a place of their own each, come back by an input that is 1 there."""
    weight = torch.arange(-127, 128).repeat(3).view(-1, 45).bfloat16()
    weight[:, 0] = 127
    layer = PackedLinear(weight, quantization="int8")
    assert torch.equal(layer(torch.eye(45).bfloat16()), weight.T)
    assert torch.equal(torch.cat([layer(row[None]) for row in torch.eye(45).bfloat16()]), weight.T)
    assert torch.equal(layer.rows(torch.arange(len(weight)), None), weight)


def test_gated(instruction_set: str) -> None:
    weight, x = random(2 * 48, 128), random(9, 128)
    gate, up = (x.double() @ rounded_weight(weight).T).bfloat16().float().chunk(2, dim=1)
    actual = PackedLinear(weight, gated="silu", quantization="int8")(x).float()
    assert (actual - F.silu(gate) * up).norm() <= 5e-3 * (F.silu(gate) * up).norm()


def test_embedding_rows_are_the_rounded_weight(instruction_set: str) -> None:
    weight = random(50, 70)
    layer = PackedLinear(weight, quantization="int8")
    token_ids = torch.tensor([49, 0, 17])
    torch.testing.assert_close(
        layer.rows(token_ids, None).double(), rounded_weight(weight)[token_ids], rtol=2**-8, atol=0
    )
