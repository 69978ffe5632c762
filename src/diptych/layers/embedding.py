"""Token embedding. Owns the table; a tied logits head borrows it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.gguf_linear import GGUFLinear, StoredBlocks
from diptych.kernels.linear import LinearKernel, PackedLinear, Quantization, can_pack
from diptych.layers.parameter import fill, new_parameter, stored_blocks, without_memory
from diptych.layers.weights import WeightSource


class Embedding(nn.Module):
    """Rows of a [vocab, hidden] table, times `scale` if given: int64 [T] to [T, hidden].

    The scale is rounded to the table's dtype first: Gemma was trained that way (sqrt(2560) = 50.596 is 50.5 in
    bfloat16).
    """

    packed: LinearKernel | None = None
    stored: tuple[StoredBlocks, ...] | None = None

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
        if self.packed is not None or not can_pack(self.weight):
            return
        if self.stored is not None:
            self.packed, self.stored = GGUFLinear(self.stored), None
        else:
            self.packed = PackedLinear(self.weight.data, quantization=quantization)
        self.weight = nn.Parameter(self.packed.weight, requires_grad=False)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight`, or note where the file's blocks are."""
        self.stored = stored_blocks(source, {f"{prefix}.weight": len(self.weight)})
        if self.stored is None:
            fill(self.weight, source, f"{prefix}.weight")
        else:
            self.weight = without_memory(self.weight)
