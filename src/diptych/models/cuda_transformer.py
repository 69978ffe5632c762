"""A transformer's step on a CUDA device, in as few kernels as it takes.

Owns the order of kernels in a step of a bfloat16 or float16 model; the weights stay the model's. The arithmetic is in
`kernels.cuda` and cuBLAS, attention in a backend. Knows nothing of requests, graphs or sampling.

T = tokens of the step, R = rows whose logits are wanted, H = query heads, G = KV heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from diptych.attention.backend import AttentionSpec
from diptych.kernels.cuda import small_linear as small
from diptych.kernels.cuda.activation import gated
from diptych.kernels.cuda.embedding import embed
from diptych.kernels.cuda.heads import prepare_heads, rotary_table
from diptych.kernels.cuda.norm import add_norm, add_rms_norm, rms_norm
from diptych.kv.pool import KVPool
from diptych.layers.linear import Linear
from diptych.layers.mlp import GatedMLP
from diptych.layers.moe import MoE
from diptych.layers.norm import RMSNorm
from diptych.layers.rotary import RotaryEmbedding
from diptych.models.transformer import LayerBlocks, Transformer


class Attend(Protocol):
    """Attention of one step over pages that hold the step's own K and V already."""

    def __call__(self, query: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Attention output [T, H, D] for query [T, H, D]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaStep:
    """Device tensors of one step.

    token_ids: int64 [T]; -1 - s stands for the last token of slot s. positions: int64 [T]. kv_slots: int64 [T], page *
    page_size + offset, negative for padding. logit_rows: int64 [R], or None for every token.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    logit_rows: torch.Tensor | None
    attend: Attend


Table = tuple[torch.Tensor, torch.Tensor]


class CudaTransformer:
    """The forward pass of `model`, whose weights must be on a CUDA device, over `pool`.

    Args: last_tokens: int64 [slots], what negative token ids refer to.
    """

    def __init__(self, model: Transformer, pool: KVPool, last_tokens: torch.Tensor) -> None:
        self._model = model
        self._pool = pool
        self._last_tokens = last_tokens
        blocks_of_layers = model.layer_blocks
        assert blocks_of_layers is not None, "a layer of other parts runs in plain torch"
        self._blocks = blocks_of_layers
        self._windows = model.config.layer_windows
        linears = [linear for blocks in self._blocks for linear in (blocks.attention.qkv, blocks.attention.o_proj)]
        networks = [blocks.mlp for blocks in self._blocks if isinstance(blocks.mlp, GatedMLP)]
        linears += [linear for mlp in networks for linear in (mlp.gate_up, mlp.down)]
        self._fuses_layers = all(
            blocks.post_attention_norm is None and blocks.post_mlp_norm is None for blocks in self._blocks
        ) and all(small.supports(linear.weight) for linear in linears)
        self._fuses_head = small.supports(model.lm_head.weight)

    def forward(self, step: CudaStep) -> torch.Tensor:
        """Hidden states [R, hidden], before the last norm: `logits` applies it."""
        hidden = self._embed(step.token_ids)
        table = _table(self._model.rotary, step.positions)
        local = table if self._model.local_rotary is None else _table(self._model.local_rotary, step.positions)
        tables = [table if window is None else local for window in self._windows]
        if self._fuses_layers and hidden.shape[0] <= small.MAX_SMALL_ROWS and step.logit_rows is None:
            return self._few_rows(hidden, tables, step)
        return self._many_rows(hidden, tables, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] in the model's dtype, of hidden states that `forward` returned."""
        head, norm = self._model.lm_head, self._model.norm
        if self._fuses_head and hidden.shape[0] <= small.MAX_SMALL_ROWS:
            logits = hidden.new_empty(hidden.shape[0], head.weight.shape[0])
            small.small_linear(hidden, head.weight, out=logits, norm_weight=norm.weight, norm_eps=norm.eps)
        else:
            logits = F.linear(_normed(hidden, norm), head.weight)
        if head.soft_cap is not None:
            logits = logits.float().div_(head.soft_cap).tanh_().mul_(head.soft_cap)
        return logits

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self._model.embed_tokens
        hidden = table.weight.new_empty(token_ids.shape[0], table.weight.shape[1])
        embed(token_ids, table.weight, last_tokens=self._last_tokens, scale=table.scale, out=hidden)
        return hidden

    def _few_rows(self, hidden: torch.Tensor, tables: list[Table], step: CudaStep) -> torch.Tensor:
        """Norms, activation and residual sums inside the GEMMs: at few rows small kernels would cost most."""
        for blocks, table in zip(self._blocks, tables, strict=True):
            attention, mlp = blocks.attention, blocks.mlp
            projected = _small(hidden, attention.qkv, norm=blocks.input_norm)
            attended = self._attended(projected, blocks, table, step)
            _small(attended, attention.o_proj, residual=hidden)
            if isinstance(mlp, MoE):
                hidden.add_(mlp(_normed(hidden, blocks.mlp_norm)))
                continue
            activated = hidden.new_empty(hidden.shape[0], mlp.intermediate_size)
            norm = blocks.mlp_norm
            small.small_linear(
                hidden,
                mlp.gate_up.weight,
                out=activated,
                bias=mlp.gate_up.bias,
                norm_weight=norm.weight,
                norm_eps=norm.eps,
                gate=mlp.activation,
            )
            _small(activated, mlp.down, residual=hidden)
        return hidden

    def _many_rows(self, hidden: torch.Tensor, tables: list[Table], step: CudaStep) -> torch.Tensor:
        normed = _normed(hidden, self._blocks[0].input_norm)
        last = len(self._blocks) - 1
        for index, (blocks, table) in enumerate(zip(self._blocks, tables, strict=True)):
            mlp = blocks.mlp
            attended = self._attended(_linear(normed, blocks.attention.qkv), blocks, table, step)
            if index == last and step.logit_rows is not None:  # the rest of the last layer, for these rows only
                attended, hidden = attended[step.logit_rows], hidden[step.logit_rows]
                if hidden.shape[0] == 0:
                    return hidden
            delta = _linear(attended, blocks.attention.o_proj)
            normed = _added_and_normed(hidden, delta, blocks.mlp_norm, delta_norm=blocks.post_attention_norm)
            delta = _fed_forward(normed, mlp)
            if index == last:
                return _added(hidden, delta, delta_norm=blocks.post_mlp_norm)
            next_norm = self._blocks[index + 1].input_norm
            normed = _added_and_normed(hidden, delta, next_norm, delta_norm=blocks.post_mlp_norm)
        return hidden

    def _attended(self, projected: torch.Tensor, blocks: LayerBlocks, table: Table, step: CudaStep) -> torch.Tensor:
        """Rotate heads, write K and V to the pool, attend: [T, H * D]."""
        attention = blocks.attention
        num_heads, num_kv_heads, _ = attention.query_key_value
        key_cache, value_cache = self._pool.layer(attention.spec.layer)
        head_norm = attention.head_norm
        prepare_heads(
            projected,
            *table,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_cache=key_cache,
            value_cache=value_cache,
            kv_slots=step.kv_slots,
            norm_weight=None if head_norm is None else head_norm.weight,
            eps=0.0 if head_norm is None else head_norm.eps,
        )
        query = projected.unflatten(-1, (-1, attention.head_dim))[:, :num_heads]
        return step.attend(query, attention.spec).flatten(1)


def _table(rotary: RotaryEmbedding, positions: torch.Tensor) -> Table:
    shape = (positions.shape[0], rotary.inverse_frequencies.shape[0])
    cos = torch.empty(shape, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    rotary_table(positions, rotary.inverse_frequencies, magnitude=rotary.magnitude, cos=cos, sin=sin)
    return cos, sin


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _fed_forward(x: torch.Tensor, mlp: GatedMLP | MoE) -> torch.Tensor:
    if isinstance(mlp, MoE):
        mixed: torch.Tensor = mlp(x)
        return mixed
    gate_up = _linear(x, mlp.gate_up)
    activated = gate_up.new_empty(gate_up.shape[0], mlp.intermediate_size)
    gated(gate_up, out=activated, kind=mlp.activation)
    return _linear(activated, mlp.down)


def _small(
    x: torch.Tensor, linear: Linear, *, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """A projection of few rows; with `residual`, it is added to that, in place."""
    out = residual if residual is not None else x.new_empty(x.shape[0], linear.weight.shape[0])
    small.small_linear(
        x,
        linear.weight,
        out=out,
        bias=linear.bias,
        norm_weight=None if norm is None else norm.weight,
        norm_eps=0.0 if norm is None else norm.eps,
        residual=residual,
    )
    return out


def _normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    out = torch.empty_like(x)
    rms_norm(x, norm.weight, eps=norm.eps, out=out)
    return out


def _added(hidden: torch.Tensor, delta: torch.Tensor, *, delta_norm: RMSNorm | None) -> torch.Tensor:
    if delta_norm is None:
        return hidden.add_(delta)
    add_norm(hidden, delta, delta_norm.weight, eps=delta_norm.eps)
    return hidden


def _added_and_normed(
    hidden: torch.Tensor, delta: torch.Tensor, norm: RMSNorm, *, delta_norm: RMSNorm | None
) -> torch.Tensor:
    out = torch.empty_like(hidden)
    delta_weight = None if delta_norm is None else delta_norm.weight
    add_rms_norm(hidden, delta, norm.weight, eps=norm.eps, out=out, delta_weight=delta_weight)
    return out
