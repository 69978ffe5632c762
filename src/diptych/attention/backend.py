"""The protocol between models and attention, and the device tensors that one step passes to a model.

Everything is passed explicitly: there is no global context. T = tokens in the step, B = rows (sequences) in the step,
H = query heads, G = KV heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Ragged shape of one step, on the device and (for planning) on the host.

    query_starts: int32 [B + 1], row b's tokens are query_starts[b]:query_starts[b + 1]. kv_lens: int32 [B], tokens of
    each sequence up to and including this step's. page_table: int32 [B, max pages], the pages that hold them; entries
    beyond a row's length are undefined. kv_slots: int64 [T], where each token's K and V go: page * page_size + offset.
    """

    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    kv_slots: torch.Tensor
    query_lens_host: list[int]
    kv_lens_host: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """What one step passes to a model.

    token_ids: int64 [T]. positions: int64 [T]. logit_rows: int64 [R], the tokens whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    attention: AttentionInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention: softmax scale, sliding window (a token sees itself and `window - 1` before it) and cap.

    value_dim: over a pool of latent rows, how many of a row's first elements are its value.
    """

    layer: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None


class AttentionBackend(Protocol):
    """Writes this step's K and V into the pool and attends over it, causally, each row to its own sequence.

    All rows' K and V are written before any row attends: a row may lease a prefix that another row of the same step
    computes.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attention output [T, H, D] for query [T, H, D], key and value [T, G, D], in the query's dtype.

        Over a pool of latent rows: [T, H, value_dim] for query [T, H, D] and key [T, 1, D], whose first elements are
        the value.
        """
        ...
