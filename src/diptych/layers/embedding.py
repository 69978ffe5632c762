"""Token embedding. Owns the table; a tied logits head borrows it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.linear import PackedLinear, Quantization, can_pack
from diptych.layers.parameter import fill, new_parameter
from diptych.layers.weights import WeightSource


class Embedding(nn.Module):
    """Rows of a [vocab, hidden] table, times `scale` if given: int64 [T] to [T, hidden].

    The scale is rounded to the table's dtype first: Gemma was trained that way (sqrt(2560) = 50.596 is 50.5 in
    bfloat16).
    """

    packed: PackedLinear | None = None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.weight = new_parameter((vocab_size, hidden_size), dtype=dtype, device=device)
        self.scale = None if scale is None else torch.tensor(scale, dtype=torch.float32).to(dtype).item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.rows(token_ids, self.scale)
        hidden = F.embedding(token_ids, self.weight)
        return hidden if self.scale is None else hidden.mul_(self.scale)

    def pack(self, quantization: Quantization = "none") -> None:
        """Reorder the table for the CPU kernel of the logits head that borrows it."""
        if self.packed is None and can_pack(self.weight):
            self.packed = PackedLinear(self.weight.data, quantization=quantization)
            self.weight = nn.Parameter(self.packed.weight, requires_grad=False)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight`."""
        fill(self.weight, source, f"{prefix}.weight")
