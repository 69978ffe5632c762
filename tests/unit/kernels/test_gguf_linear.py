"""Layers over GGUF blocks against the gguf library's dequantisation, exactly or with the bound that rounding allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf_blocks import KINDS, block_len, dequantised, random_rows, stored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.gguf_linear import GGUFLinear, has_block_kernel
from diptych.kernels.library import Kernels

SMALLEST_HALF, LARGE_HALF = 2.0**-24, 2000.0

any_example = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer_and_weight(kind: str, outputs: int, inputs: int, **options: float) -> tuple[GGUFLinear, torch.Tensor]:
    rows = random_rows(kind, outputs, inputs, **options)
    return GGUFLinear([stored(kind, rows, inputs)]), dequantised(kind, rows)


def assert_close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Inputs and weights are exact; sums are float32, and the result is rounded to bfloat16: 2**-8 of it at most."""
    expected = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    bound = 2.0**-8 * expected.abs() + x.shape[1] * 2.0**-24 * terms + 2.0**-126
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@any_example
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 3),
    scale=st.sampled_from([SMALLEST_HALF, 0.01, LARGE_HALF]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    instruction_set: str, kind: str, rows: int, outputs: int, blocks: int, scale: float, seed: int
) -> None:
    inputs = blocks * block_len(kind)
    layer, weight = layer_and_weight(kind, outputs, inputs, seed=seed, scale=scale)
    x = random(rows, inputs, seed=seed + 1)
    assert_close(layer(x), x, weight)
    assert torch.equal(layer.logits(x), layer(x).float())


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_dequantised_ones(instruction_set: str, kind: str) -> None:
    layer, weight = layer_and_weight(kind, 37, 512)
    token_ids = torch.tensor([36, 0, 17, 0])
    assert torch.equal(layer.rows(token_ids, None), weight[token_ids].bfloat16())
    assert torch.equal(layer.rows(token_ids, 25.25), weight[token_ids].bfloat16() * 25.25)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_beside_any_number_of_others(instruction_set: str, kind: str) -> None:
    layer, _ = layer_and_weight(kind, 80, 768)
    x = random(40, 768)
    whole = layer(x)
    for num_rows in (1, 2, 3, 4, 5, 16, 17, 39):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])


def test_many_rows_in_panels(instruction_set: str) -> None:
    layer, weight = layer_and_weight("Q4_K", 48, 2048)
    x = random(300, 2048)
    assert_close(layer(x), x, weight)
    assert torch.equal(layer(x)[299:], layer(x[299:]))


@pytest.mark.parametrize("rows", [1, 3, 21])
def test_parts_of_several_formats_with_a_bias(instruction_set: str, rows: int) -> None:
    kinds, sizes = ("Q5_0", "Q6_K", "Q2_K", "Q8_0"), (32, 16, 48, 21)
    stacked = [random_rows(kind, size, 256, seed=size) for kind, size in zip(kinds, sizes, strict=True)]
    weight = torch.cat([dequantised(kind, part) for kind, part in zip(kinds, stacked, strict=True)])
    bias, x = random(sum(sizes)), random(rows, 256)
    parts = [stored(kind, part, 256) for kind, part in zip(kinds, stacked, strict=True)]
    plain, biased = GGUFLinear(parts).logits(x), GGUFLinear(parts, bias).logits(x)
    assert_close(plain, x, weight)
    torch.testing.assert_close(biased, x.float() @ weight.T + bias.float(), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [48, 40])
def test_gated(instruction_set: str, activation: str, size: int) -> None:
    gate_rows, up_rows = random_rows("Q4_K", size, 256), random_rows("Q6_K", size, 256, seed=1)
    gate_weight, up_weight = dequantised("Q4_K", gate_rows), dequantised("Q6_K", up_rows)
    layer = GGUFLinear([stored("Q4_K", gate_rows, 256), stored("Q6_K", up_rows, 256)], gated=activation)
    x = random(9, 256)
    gate, up = x.float() @ gate_weight.T, x.float() @ up_weight.T
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    for rows in (1, 9):
        actual, expected = layer(x[:rows]).float(), (activated * up)[:rows]
        assert (actual - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_argmax_is_that_of_the_logits(instruction_set: str, rows: int) -> None:
    layer, _ = layer_and_weight("Q8_0", 700, 64)
    x = random(rows, 64)
    indices, values = layer.argmax(x)
    logits = layer.logits(x)
    assert torch.equal(indices, logits.argmax(1)) and torch.equal(values, logits.amax(1))


def test_outputs_come_in_the_order_asked_for(library: Kernels) -> None:
    rows, order = random_rows("Q5_K", 32, 256), np.random.default_rng(1).permutation(32)
    layer = GGUFLinear([stored("Q5_K", rows, 256, order=order)])
    x = random(2, 256)
    assert torch.equal(layer(x), GGUFLinear([stored("Q5_K", rows[order], 256)])(x))


def test_memory_is_that_of_the_file(library: Kernels) -> None:
    for kind, most in (("Q4_0", 1.0), ("Q8_0", 1.0), ("Q6_K", 1.0), ("Q4_K", 1.03)):
        rows = random_rows(kind, 64, 2048)
        assert GGUFLinear([stored(kind, rows, 2048)]).weight.nbytes <= most * rows.nbytes


def test_release_is_called_once_the_rows_are_copied(library: Kernels) -> None:
    rows, released = random_rows("Q8_0", 16, 64), []
    part = stored("Q8_0", rows, 64)
    object.__setattr__(part, "release", lambda: released.append(rows.fill(0)))
    layer = GGUFLinear([part])
    assert len(released) == 1 and layer(random(1, 64)).abs().sum() > 0


def test_what_has_no_kernel_is_refused(library: Kernels) -> None:
    assert has_block_kernel(8, 64)
    assert not has_block_kernel(8, 80)  # Q8_0: no whole block
    assert not has_block_kernel(0, 64)  # F32
    assert not has_block_kernel(16, 256)  # IQ2_XXS
