"""Packed linear layers against float32 products, and their invariances, which are exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.linear import Activation, PackedLinear

any_shape = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float = 5e-3) -> None:
    assert actual.shape == expected.shape
    assert (actual.float() - expected).norm() <= relative * expected.norm() + 1e-6


@any_shape
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 130),
    inputs=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(instruction_set: str, rows: int, outputs: int, inputs: int, bias: bool, seed: int) -> None:
    weight, x = random(outputs, inputs, seed=seed), random(rows, inputs, seed=seed + 1)
    offset = random(outputs, seed=seed + 2) if bias else None
    expected = x.float() @ weight.float().T + (0 if offset is None else offset.float())
    layer = PackedLinear(weight.clone(), offset)
    actual = layer(x)
    assert_close(actual, expected)
    assert torch.equal(layer.logits(x), actual.float())


@any_shape
@given(rows=st.integers(1, 40), half=st.integers(1, 70), inputs=st.integers(1, 100), seed=st.integers(0, 99))
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gated(instruction_set: str, activation: Activation, rows: int, half: int, inputs: int, seed: int) -> None:
    weight, x, bias = random(2 * half, inputs, seed=seed), random(rows, inputs), random(2 * half)
    gate, up = (x.float() @ weight.float().T + bias.float()).bfloat16().chunk(2, dim=1)
    gate = F.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else F.silu(gate)
    layer = PackedLinear(weight.clone(), bias, gated=activation)
    assert_close(layer(x), (gate * up).float(), relative=1e-2)


@pytest.mark.parametrize("inputs", [32, 96, 640, 2048])
def test_a_row_is_the_same_bits_beside_any_number_of_others(instruction_set: str, inputs: int) -> None:
    layer, x = PackedLinear(random(80, inputs)), random(50, inputs)
    whole = layer(x)
    for num_rows in (1, 2, 4, 5, 15, 16, 17, 32, 33, 49):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])
        assert torch.equal(layer(x[50 - num_rows :]), whole[50 - num_rows :])


def test_strided_input_and_denormals(instruction_set: str) -> None:
    weight, wide = random(48, 64), random(20, 200)
    assert torch.equal(
        PackedLinear(weight.clone())(wide[:, 30:94]), PackedLinear(weight.clone())(wide[:, 30:94].clone())
    )
    tiny = torch.full((3, 64), 1e-39).bfloat16()
    assert torch.equal(PackedLinear(weight.clone())(tiny), torch.zeros(3, 48).bfloat16())


def test_whole_blocks_are_packed_in_place_and_give_the_rows_back(instruction_set: str) -> None:
    weight = random(64, 96)
    before, address = weight.clone(), weight.data_ptr()
    layer = PackedLinear(weight)
    assert layer.weight.data_ptr() == address
    assert not torch.equal(weight, before)
    token_ids = torch.tensor([0, 63, 17, 17, 5])
    assert torch.equal(layer.rows(token_ids, None), before[token_ids])
    assert torch.equal(layer.rows(token_ids, 2.5), before[token_ids] * 2.5)


def test_gated_halves_are_interleaved_in_place(instruction_set: str) -> None:
    weight = random(64, 64)
    expected = PackedLinear(weight.clone())(random(3, 64)).chunk(2, dim=1)
    address = weight.data_ptr()
    layer = PackedLinear(weight, gated="silu")
    assert layer.weight.data_ptr() == address
    assert_close(layer(random(3, 64)), (F.silu(expected[0]) * expected[1]).float(), relative=1e-2)


def test_not_a_number_stays_one(instruction_set: str) -> None:
    x = random(2, 32)
    x[1, 3] = float("nan")
    out = PackedLinear(random(16, 32))(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@any_shape
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 900),
    inputs=st.integers(1, 80),
    is_quantized=st.booleans(),
    seed=st.integers(0, 99),
)
def test_argmax_is_that_of_the_logits(
    instruction_set: str, rows: int, outputs: int, inputs: int, is_quantized: bool, seed: int
) -> None:
    # Few distinct values: most rows have several largest logits, and the first counts.
    weight, x = random(outputs, inputs, seed=seed).sign(), random(rows, inputs, seed=seed + 1).sign()
    layer = PackedLinear(weight, random(outputs).sign(), quantization="int8" if is_quantized else "none")
    logits, (indices, values) = layer.logits(x), layer.argmax(x)
    assert indices.tolist() == logits.numpy().argmax(axis=1).tolist()
    assert torch.equal(values, logits.max(dim=1).values)


def test_argmax_of_infinities_and_nan(instruction_set: str) -> None:
    weight = torch.eye(700, 32).bfloat16()
    weight[650] = torch.inf
    x = torch.ones(3, 32).bfloat16()
    x[1] = -1
    x[2, 3] = torch.nan
    indices, values = PackedLinear(weight).argmax(x)
    assert (indices[0], values[0]) == (650, torch.inf)
    assert (indices[1], values[1]) == (32, 0)
    assert values[2].isnan()
