"""Token embedding. Owns the table; a tied logits head borrows it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.gguf_linear import GGUFLinear, StoredBlocks
from diptych.kernels.linear import LinearKernel, PackedLinear, Quantization, can_pack
from diptych.kernels.packed_rows import PackedRows
from diptych.layers.parameter import fill, new_parameter, stored_blocks, without_memory
from diptych.layers.shard import Part, vocabulary_share
from diptych.layers.weights import WeightSource
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE


class Embedding(nn.Module):
    """Rows of a [vocab, hidden] table, times `scale` if given: int64 [T] to [T, hidden].

    Args: group: ranks that share the table: each looks up the tokens that it has, and they add up, to the very bits.

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
        group: GroupCoordinator = ALONE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.group = group
        self.share = vocabulary_share(vocab_size, group)
        self.weight = new_parameter((len(self.share), hidden_size), dtype=dtype, device=device)
        self.scale = None if scale is None else torch.tensor(scale, dtype=torch.float32).to(dtype).item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self._rows(token_ids)
        is_elsewhere = (token_ids < self.share.start) | (token_ids >= self.share.stop)
        rows = self._rows((token_ids - self.share.start).masked_fill_(is_elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0.0))

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
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
        part = Part(self.share)
        self.stored = stored_blocks(source, {f"{prefix}.weight": part})
        if self.stored is None:
            rows = self.weight if self.packed is None else PackedRows(self.packed, 0, len(self.share))
            fill(rows, source, f"{prefix}.weight", part=None if self.share.is_whole else part)
        else:
            self.weight = without_memory(self.weight)
