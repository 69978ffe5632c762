"""Linear layers: one projection, or several that read the same input as a single GEMM.

Owns their weights. Knows nothing of models or of attention. Shapes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.gguf_linear import GGUFLinear, StoredBlocks
from diptych.kernels.linear import Activation, LinearKernel, PackedLinear, Quantization, can_pack
from diptych.layers.parameter import fill, new_parameter, stored_blocks, without_memory
from diptych.layers.weights import WeightSource


class Linear(nn.Module):
    """`x @ weight.T + bias`: [T, I] to [T, O]. Weight [O, I], until it is packed."""

    packed: LinearKernel | None = None
    stored: tuple[StoredBlocks, ...] | None = None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = new_parameter((out_features, in_features), dtype=dtype, device=device)
        self.bias = new_parameter((out_features,), dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)

    def pack(self, quantization: Quantization = "none", *, gated: Activation | None = None) -> None:
        """Reorder the weight for the CPU kernel, if there is one for it; with `gated`, the kernel also applies that."""
        if self.packed is not None or not can_pack(self.weight):
            return
        bias = None if self.bias is None else self.bias.data
        if self.stored is not None:
            self.packed, self.stored = GGUFLinear(self.stored, bias, gated=gated), None
        else:
            self.packed = PackedLinear(self.weight.data, bias, gated=gated, quantization=quantization)
        self.weight = nn.Parameter(self.packed.weight, requires_grad=False)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight` and, with a bias, `{prefix}.bias`."""
        self._load_parts(source, {prefix: len(self.weight)})

    def _load_parts(self, source: WeightSource, parts: dict[str, int]) -> None:
        """Read `.weight` and `.bias` of every part into its rows, or note where the file's blocks are."""
        self.stored = stored_blocks(source, {f"{name}.weight": size for name, size in parts.items()})
        start = 0
        for name, size in parts.items():
            if self.stored is None:
                fill(self.weight[start : start + size], source, f"{name}.weight")
            if self.bias is not None:
                fill(self.bias[start : start + size], source, f"{name}.bias")
            start += size
        if self.stored is not None:
            self.weight = without_memory(self.weight)


class MergedLinear(Linear):
    """Projections that share an input, stacked along their outputs: one GEMM instead of several.

    Args: parts: name of each projection in the checkpoint and its number of outputs, in the order of the output's
    columns.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = dict(parts)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.{part}.weight` and, with biases, `{prefix}.{part}.bias` of every part."""
        self._load_parts(source, {f"{prefix}.{name}": size for name, size in self.parts.items()})
