"""The projection from hidden states to logits. Owns its weight unless that is tied to the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.gguf_linear import GGUFLinear, StoredBlocks
from diptych.kernels.linear import LinearKernel, PackedLinear, Quantization, can_pack
from diptych.kernels.packed_rows import PackedRows
from diptych.layers.embedding import Embedding
from diptych.layers.parameter import fill, new_parameter, stored_blocks, without_memory
from diptych.layers.shard import Part, vocabulary_share
from diptych.layers.weights import WeightSource
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE


class LogitsHead(nn.Module):
    """Logits of R rows: [R, hidden] to float32 [R, vocab].

    Args: tied_to: the embedding whose table is the weight; None for a weight of its own. soft_cap: logits are
    `soft_cap * tanh(logits / soft_cap)`, in float32. group: ranks that share the vocabulary, as an embedding's do: each
    computes the logits of its rows, and all get all of them, the same bits.
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
        group: GroupCoordinator = ALONE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.group = group
        self.share = vocabulary_share(vocab_size, group)
        self.is_tied = tied_to is not None
        self._tied_to = () if tied_to is None else (tied_to,)  # no child: the table is not ours
        self.soft_cap = soft_cap
        self.weight = (
            tied_to.weight
            if tied_to is not None
            else new_parameter((len(self.share), hidden_size), dtype=dtype, device=device)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._own_logits(hidden)
        if self.group.size == 1:
            return logits
        per_rank = -(-self.share.size // self.group.size)
        padded = F.pad(logits, (0, per_rank - len(self.share)), value=float("-inf"))
        return self.group.all_gather(padded, dim=1)[:, : self.share.size].contiguous()

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [R, rows of this rank]."""
        logits = F.linear(hidden, self.weight).float() if self.packed is None else self.packed.logits(hidden)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index of each row's largest logit, int64 [R], and that logit, float32 [R], from one pass over the weight.

        None where there is no kernel for it. A soft cap may make equals of different logits, so it needs them all.
        """
        if self.soft_cap is not None:
            return None
        if self.group.size > 1:
            return self._likeliest_of_all(*self._own_likeliest(hidden))
        return None if self.packed is None else self.packed.argmax(hidden)

    def _own_likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest index of each row's largest logit among this rank's, and that logit."""
        if self.packed is not None:
            return self.packed.argmax(hidden)
        logits = self._own_logits(hidden)
        indices = logits.argmax(dim=1)
        return indices, logits.gather(1, indices.unsqueeze(1)).squeeze(1)

    def _likeliest_of_all(self, indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of what every rank found; of equal ones the first rank's, whose index is the lowest."""
        # Float64 holds an index and a float32 exactly, so that one collective carries both.
        own = torch.stack((values.double(), (indices + self.share.start).double()))
        found = self.group.all_gather(own.unsqueeze(0), dim=0)
        best = found[:, 0].argmax(dim=0, keepdim=True)
        value, index = (found[:, row].gather(0, best).squeeze(0) for row in (0, 1))
        return index.long(), value.float()

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
        part = Part(self.share)
        self.stored = stored_blocks(source, {f"{prefix}.weight": part})
        if self.stored is None:
            rows = self.weight if self.packed is None else PackedRows(self.packed, 0, len(self.share))
            fill(rows, source, f"{prefix}.weight", part=None if self.share.is_whole else part)
        else:
            self.weight = without_memory(self.weight)
