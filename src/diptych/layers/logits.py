"""The projection from hidden states to logits. Owns its weight unless that is tied to the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.linear import PackedLinear, Quantization, can_pack
from diptych.layers.embedding import Embedding
from diptych.layers.parameter import fill, new_parameter
from diptych.layers.weights import WeightSource


class LogitsHead(nn.Module):
    """Logits of R rows: [R, hidden] to float32 [R, vocab].

    Args: tied_to: the embedding whose table is the weight; None for a weight of its own. soft_cap: logits are
    `soft_cap * tanh(logits / soft_cap)`, in float32.
    """

    packed: PackedLinear | None = None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None = None,
        soft_cap: float | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.is_tied = tied_to is not None
        self._tied_to = () if tied_to is None else (tied_to,)  # no child: the table is not ours
        self.soft_cap = soft_cap
        self.weight = (
            tied_to.weight
            if tied_to is not None
            else new_parameter((vocab_size, hidden_size), dtype=dtype, device=device)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, self.weight).float() if self.packed is None else self.packed.logits(hidden)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def pack(self, quantization: Quantization = "none") -> None:
        """Reorder the weight for the CPU kernel; a tied table is packed once, for both."""
        if self.packed is not None:
            return
        for embedding in self._tied_to:
            embedding.pack(quantization)
            self.packed, self.weight = embedding.packed, embedding.weight
        if not self.is_tied and can_pack(self.weight):
            self.packed = PackedLinear(self.weight.data, quantization=quantization)
            self.weight = nn.Parameter(self.packed.weight, requires_grad=False)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight`, or nothing when tied."""
        if not self.is_tied:
            fill(self.weight, source, f"{prefix}.weight")
