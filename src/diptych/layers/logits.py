"""The projection from hidden states to logits. Owns its weight unless that is tied to the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.gguf_linear import GGUFLinear, StoredBlocks
from diptych.kernels.linear import LinearKernel, PackedLinear, Quantization, can_pack
from diptych.layers.embedding import Embedding
from diptych.layers.parameter import fill, new_parameter, stored_blocks, without_memory
from diptych.layers.weights import WeightSource


class LogitsHead(nn.Module):
    """Logits of R rows: [R, hidden] to float32 [R, vocab].

    Args: tied_to: the embedding whose table is the weight; None for a weight of its own. soft_cap: logits are
    `soft_cap * tanh(logits / soft_cap)`, in float32.
    """

    packed: LinearKernel | None = None
    stored: tuple[StoredBlocks, ...] | None = None

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

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index of each row's largest logit, int64 [R], and that logit, float32 [R], from one pass over the weight.

        None where there is no kernel for it. A soft cap may make equals of different logits, so it needs them all.
        """
        if self.packed is None or self.soft_cap is not None:
            return None
        return self.packed.argmax(hidden)

    def pack(self, quantization: Quantization = "none") -> None:
        """Reorder the weight for the CPU kernel; a tied table is packed once, for both."""
        if self.packed is not None:
            return
        for embedding in self._tied_to:
            embedding.pack(quantization)
            self.packed, self.weight = embedding.packed, embedding.weight
        if self.is_tied or not can_pack(self.weight):
            return
        if self.stored is not None:
            self.packed, self.stored = GGUFLinear(self.stored), None
        else:
            self.packed = PackedLinear(self.weight.data, quantization=quantization)
        self.weight = nn.Parameter(self.packed.weight, requires_grad=False)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight`, or note where the file's blocks are; nothing when tied."""
        if self.is_tied:
            return
        self.stored = stored_blocks(source, {f"{prefix}.weight": len(self.weight)})
        if self.stored is None:
            fill(self.weight, source, f"{prefix}.weight")
        else:
            self.weight = without_memory(self.weight)
