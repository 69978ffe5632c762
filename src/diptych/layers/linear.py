"""Linear layers: one projection, or several that read the same input as a single GEMM.

Owns their weights. Knows nothing of models or of attention. Shapes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.gguf_linear import GGUFLinear, StoredBlocks
from diptych.kernels.linear import Activation, LinearKernel, PackedLinear, Quantization, can_pack
from diptych.kernels.packed_rows import PackedRows
from diptych.layers.parameter import fill, new_parameter, stored_blocks, without_memory
from diptych.layers.shard import Part, Share
from diptych.layers.weights import Rows, WeightSource
from diptych.parallel.groups import GroupCoordinator


class Adapters(Protocol):
    """Low-rank adapters on top of one layer."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """What the layer computes from x with the adapters of the step under way; None where no row has one."""
        ...


class Linear(nn.Module):
    """`x @ weight.T + bias`: [T, I] to [T, O]. Weight [O, I], until it is packed."""

    packed: LinearKernel | None = None
    stored: tuple[StoredBlocks, ...] | None = None
    adapters: Adapters | None = None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = new_parameter((out_features, in_features), dtype=dtype, device=device)
        self.bias = new_parameter((out_features,), dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = None if self.adapters is None else self.adapters(x)
        return self.base(x) if adapted is None else adapted

    def base(self, x: torch.Tensor) -> torch.Tensor:
        """The layer without adapters."""
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)

    def pack(self, quantization: Quantization = "none", *, gated: Activation | None = None) -> None:
        """Reorder the weight for the CPU kernel, if there is one for it; with `gated`, the kernel also applies that."""
        if self.packed is not None or not can_pack(self.weight):
            return
        bias = self._packed_bias()
        if self.stored is not None:
            self.packed, self.stored = GGUFLinear(self.stored, bias, gated=gated), None
        else:
            self.packed = PackedLinear(self.weight.data, bias, gated=gated, quantization=quantization)
        self.weight = nn.Parameter(self.packed.weight, requires_grad=False)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight` and, with a bias, `{prefix}.bias`."""
        self._load_outputs(source, {prefix: Share.whole(self.out_features)})

    def _load_outputs(self, source: WeightSource, shares: dict[str, Share]) -> None:
        """Read each projection's share of `.weight` and `.bias` into its rows, or note where the file's blocks are."""
        parts = {name: Part(share) for name, share in shares.items()}
        self.stored = stored_blocks(source, {f"{name}.weight": part for name, part in parts.items()})
        start = 0
        for name, part in parts.items():
            stop = start + len(part.share)
            wanted = None if part.share.is_whole else part
            if self.stored is None:
                fill(self._outputs(start, stop), source, f"{name}.weight", part=wanted)
            if self.bias is not None:
                fill(self.bias[start:stop], source, f"{name}.bias", part=wanted)
            start = stop
        self._loaded()

    def _loaded(self) -> None:
        """Let go of memory that is not needed, and tell a packed weight its bias."""
        if self.stored is not None:
            self.weight = without_memory(self.weight)
        if self.packed is not None and (bias := self._packed_bias()) is not None:
            self.packed.set_bias(bias)

    def _packed_bias(self) -> torch.Tensor | None:
        """What the CPU kernel adds."""
        return None if self.bias is None else self.bias.data

    def _outputs(self, start: int, stop: int) -> Rows:
        """Rows of the weight, wherever they are now."""
        return self.weight[start:stop] if self.packed is None else PackedRows(self.packed, start, stop)


class MergedLinear(Linear):
    """Projections that share an input, stacked along their outputs: one GEMM instead of several.

    Args: parts: name of each projection in the checkpoint and its number of outputs, or this rank's share of them, in
    the order of the output's columns.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | Share],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shares = {name: size if isinstance(size, Share) else Share.whole(size) for name, size in parts.items()}
        self.parts = {name: len(share) for name, share in self.shares.items()}
        super().__init__(in_features, sum(self.parts.values()), bias=bias, dtype=dtype, device=device)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.{part}.weight` and, with biases, `{prefix}.{part}.bias` of every part."""
        self._load_outputs(source, {f"{prefix}.{name}": share for name, share in self.shares.items()})


class RowLinear(Linear):
    """A projection whose inputs are dealt to the ranks of a group: each computes its part of the sum, then they add up.

    Args: inputs: this rank's. Of one rank it is a `Linear`. The bias is added once, to the sum.
    """

    def __init__(
        self,
        inputs: Share,
        out_features: int,
        *,
        group: GroupCoordinator,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(len(inputs), out_features, bias=bias, dtype=dtype, device=device)
        self.group = group
        self.inputs = inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joined(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank contributes, to be `joined`; other contributions may be added to it first."""
        return super().forward(x)

    def base(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return super().base(x)
        return F.linear(x, self.weight) if self.packed is None else self.packed(x)

    def joined(self, partial: torch.Tensor) -> torch.Tensor:
        """The ranks' contributions added up, and the bias."""
        if self.group.size == 1:
            return partial
        total = self.group.all_reduce(partial)
        return total if self.bias is None else total.add_(self.bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read this rank's columns of `{prefix}.weight`, and, with a bias, all of `{prefix}.bias`."""
        part = Part(self.inputs, dim=1)
        self.stored = stored_blocks(source, {f"{prefix}.weight": part})
        if self.stored is None:
            wanted = None if self.inputs.is_whole else part
            fill(self._outputs(0, self.out_features), source, f"{prefix}.weight", part=wanted)
        if self.bias is not None:
            fill(self.bias, source, f"{prefix}.bias")
        self._loaded()

    def _packed_bias(self) -> torch.Tensor | None:
        return super()._packed_bias() if self.group.size == 1 else None
