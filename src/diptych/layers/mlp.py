"""The gated feed-forward network (Shazeer 2020, https://arxiv.org/abs/2002.05202). Owns its two GEMMs."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.linear import Quantization
from diptych.layers.linear import MergedLinear, RowLinear
from diptych.layers.shard import even_share
from diptych.layers.weights import WeightSource
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`: [T, hidden] to [T, hidden]. The ranks of `group` share the inner size."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Literal["silu", "gelu_tanh"],
        bias: bool = False,
        group: GroupCoordinator = ALONE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        inner = even_share(intermediate_size, group, "intermediate elements (intermediate_size)")
        self.intermediate_size = len(inner)
        self.activation: Literal["silu", "gelu_tanh"] = activation
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = MergedLinear(hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = RowLinear(inner, hidden_size, group=group, bias=bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.joined(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank contributes, to be `joined` by `down`."""
        if self.gate_up.packed is not None:
            return self.down.partial(self.gate_up(x))
        gate, up = self.gate_up(x).split(self.intermediate_size, dim=-1)
        activated = F.gelu(gate, approximate="tanh") if self.activation == "gelu_tanh" else F.silu(gate)
        return self.down.partial(activated.mul_(up))

    def pack(self, quantization: Quantization = "none") -> None:
        """Pack both GEMMs; the first then applies the activation as well."""
        self.gate_up.pack(quantization, gated=self.activation)
        self.down.pack(quantization)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.gate_proj`, `.up_proj` and `.down_proj`."""
        self.gate_up.load(source, prefix)
        self.down.load(source, f"{prefix}.down_proj")
