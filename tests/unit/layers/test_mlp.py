"""The gated MLP against its formula."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from diptych.layers.mlp import GatedMLP


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_the_formula(activation: Literal["silu", "gelu_tanh"], bias: bool) -> None:
    mlp = GatedMLP(6, 10, activation=activation, bias=bias, dtype=torch.float32, device="cpu")
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(4, 6)
    projected = x @ mlp.gate_up.weight.T + (mlp.gate_up.bias if bias else 0)
    gate, up = projected[:, :10], projected[:, 10:]
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    expected = (activated * up) @ mlp.down.weight.T + (mlp.down.bias if bias else 0)
    torch.testing.assert_close(mlp(x), expected)
