"""RMS normalisation of hidden states and of attention heads (Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467).

Owns the norms' weights. Two orders of rounding exist, and a model in bfloat16 must keep the one it was trained with:
Llama rounds the normalised value to the dtype and then multiplies by the weight; Gemma multiplies by (1 + weight) in
float32 and rounds once.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.kernels.linear import Quantization
from diptych.kernels.norm import FusedNorm, can_normalize
from diptych.layers.parameter import fill, new_parameter
from diptych.layers.weights import WeightSource


def rms_normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in x's dtype.

    Computed in float32. A float32 weight multiplies before the result is rounded to x's dtype, a weight in x's dtype
    after. Shapes: x [..., D]; weight broadcasts against it.
    """
    # vector_norm needs no temporary for the squares, and the rest is in place: on a CPU the page faults of fresh large
    # temporaries cost more than the arithmetic.
    normalized = x.to(torch.float32, copy=True)
    inverse = torch.linalg.vector_norm(normalized, dim=-1, keepdim=True)
    inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normalized.mul_(inverse)
    if weight.dtype == torch.float32:
        return normalized.mul_(weight).to(x.dtype)
    return normalized.to(x.dtype).mul_(weight)


class RMSNorm(nn.Module):
    """Normalises [T, D] over its last dimension, alone or together with the residual stream.

    Args: unit_offset: Gemma's form, where the checkpoint holds the weight minus one; 1 + weight is kept in float32.
    """

    fused: FusedNorm | None = None

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        unit_offset: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.dtype = dtype
        self.unit_offset = unit_offset
        self.weight = new_parameter((size,), dtype=torch.float32 if unit_offset else dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_normalize(x, self.weight, self.eps) if self.fused is None else self.fused(x)

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`hidden += norm(x)` in place: the residual step of a block whose output is normalised."""
        return hidden.add_(self(x)) if self.fused is None else self.fused.add_to(hidden, x)

    def after_adding(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`hidden += x` in place, then norm(hidden): from one block to the next where its input is normalised."""
        return self(hidden.add_(x)) if self.fused is None else self.fused.after_adding(hidden, x)

    def pack(self, quantization: Quantization = "none") -> None:
        """Use the CPU kernel, if there is one; norms are never quantised."""
        if self.fused is None and can_normalize(self.weight):
            self.fused = FusedNorm(self.weight.data, self.eps, dtype=self.dtype)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight`."""
        fill(self.weight, source, f"{prefix}.weight", offset=float(self.unit_offset))


class QueryKeyNorm(nn.Module):
    """Normalises each query head and each key head, all in one pass: [T, H + G, D], query heads first.

    H query heads share one weight and G key heads another; they are kept expanded, [H + G, D].
    """

    def __init__(
        self,
        head_dim: int,
        eps: float,
        *,
        num_heads: int,
        num_kv_heads: int,
        unit_offset: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.num_heads = num_heads
        self.unit_offset = unit_offset
        shape = (num_heads + num_kv_heads, head_dim)
        self.weight = new_parameter(shape, dtype=torch.float32 if unit_offset else dtype, device=device)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return rms_normalize(heads, self.weight, self.eps)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.q_norm.weight` and `{prefix}.k_norm.weight`."""
        queries, keys = self.weight[: self.num_heads], self.weight[self.num_heads :]
        for heads, name in ((queries, "q_norm"), (keys, "k_norm")):
            fill(heads[0], source, f"{prefix}.{name}.weight", offset=float(self.unit_offset))
            heads[1:] = heads[0]
