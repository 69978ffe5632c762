"""Rows of packed weights, read and written in place, against packing the changed weight anew."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.library import Kernels
from diptych.kernels.linear import PackedLinear
from diptych.kernels.packed_rows import PackedRows


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    half=st.integers(1, 50),
    inputs=st.integers(1, 100),
    gated=st.booleans(),
    quantization=st.sampled_from(["none", "int8"]),
    rows=st.tuples(st.integers(0, 100), st.integers(0, 100)),
)
def test_writing_rows_equals_packing_anew(
    library: Kernels, half: int, inputs: int, gated: bool, quantization: str, rows: tuple[int, int]
) -> None:
    outputs = 2 * half
    old, new = random(outputs, inputs, seed=1), random(outputs, inputs, seed=2)
    start, stop = sorted(min(row, outputs) for row in rows)
    expected = old.clone()
    expected[start:stop] = new[start:stop]
    options = {"gated": "silu" if gated else None, "quantization": quantization}
    layer, fresh = PackedLinear(old.clone(), **options), PackedLinear(expected.clone(), **options)
    PackedRows(layer, 0, outputs)[start:stop].copy_(new[start:stop].float())
    assert torch.equal(layer.weight, fresh.weight)
    assert layer.scales is None or torch.equal(layer.scales, fresh.scales)
    read = PackedRows(layer, start, stop).to_tensor()
    if quantization == "none":
        assert torch.equal(read, expected[start:stop])
    else:
        scale = expected[start:stop].float().abs().amax(dim=1, keepdim=True) / 127
        assert ((read.float() - expected[start:stop].float()).abs() <= scale * 0.51 + read.float().abs() * 2**-8).all()


def test_a_bias_is_replaced_in_the_order_of_the_outputs(library: Kernels) -> None:
    weight, x = random(48, 32, seed=1), random(3, 32, seed=2)
    layer = PackedLinear(weight.clone(), random(48, seed=3), gated="silu")
    layer.set_bias(random(48, seed=4))
    assert torch.equal(layer(x), PackedLinear(weight.clone(), random(48, seed=4), gated="silu")(x))


def test_rows_look_like_a_matrix(library: Kernels) -> None:
    rows = PackedRows(PackedLinear(random(40, 20, seed=1)), 8, 40)
    assert rows.shape == (32, 20) and len(rows) == 32 and rows.numel() == 640 and not rows.is_meta
    assert rows[4:8].shape == (4, 20) and rows[30:99].shape == (2, 20) and len(rows[9:3]) == 0
    before = rows[4:8].to_tensor()
    rows[4:8].add_(1.0)
    assert torch.equal(rows[4:8].to_tensor(), before + 1.0)
