"""The gated feed-forward network (Shazeer 2020, https://arxiv.org/abs/2002.05202). Owns its two GEMMs."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.linear import Quantization
from diptych.layers.linear import Linear, MergedLinear
from diptych.layers.weights import WeightSource


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`: [T, hidden] to [T, hidden]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Literal["silu", "gelu_tanh"],
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.activation: Literal["silu", "gelu_tanh"] = activation
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = MergedLinear(hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_up.packed is not None:
            return self.down(self.gate_up(x))
        gate, up = self.gate_up(x).split(self.intermediate_size, dim=-1)
        activated = F.gelu(gate, approximate="tanh") if self.activation == "gelu_tanh" else F.silu(gate)
        return self.down(activated.mul_(up))

    def pack(self, quantization: Quantization = "none") -> None:
        """Pack both GEMMs; the first then applies the activation as well."""
        self.gate_up.pack(quantization, gated=self.activation)
        self.down.pack(quantization)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.gate_proj`, `.up_proj` and `.down_proj`."""
        self.gate_up.load(source, prefix)
        self.down.load(source, f"{prefix}.down_proj")
