"""The decoder-only transformer that every architecture here is a variation of.

Owns the walk from token ids to hidden states and logits, the attention block, and the way from checkpoint names to
layers: children are named as in the checkpoint. An architecture's own file says what one layer computes, in which
order. Knows nothing of requests, scheduling or ranks.

T = tokens in the step, R = rows whose logits are wanted, H = query heads, G = KV heads, D = head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, cast

import torch
from torch import nn

from diptych.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec, ForwardInputs
from diptych.layers.embedding import Embedding
from diptych.layers.linear import Linear, MergedLinear
from diptych.layers.logits import LogitsHead
from diptych.layers.mlp import GatedMLP
from diptych.layers.norm import QueryKeyNorm, RMSNorm
from diptych.layers.rotary import RotaryEmbedding, Rotation, rotate
from diptych.layers.weights import WeightSource
from diptych.models.config import TransformerConfig
from diptych.models.rope import rope_frequencies


class Model(Protocol):
    """What a worker asks of a model."""

    config: TransformerConfig

    def load(self, source: WeightSource) -> None:
        """Read every weight. Raises ConfigError naming a tensor that is missing or has the wrong shape."""
        ...

    def forward(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states after the last norm, [T, hidden], in the model's dtype."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [R, vocab], of hidden states [R, hidden] that `forward` returned."""
        ...


class Loadable(Protocol):
    """A part of a model that reads its own weights; those of tensor `{prefix}.weight` and the like."""

    def load(self, source: WeightSource, prefix: str) -> None: ...


class SelfAttention(nn.Module):
    """Projections, optional normalisation of heads, rotation, attention over the pages, output projection.

    Args: head_norm: normalises query and key heads before they are rotated; None where the architecture does not.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        head_norm: QueryKeyNorm | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query_key = (config.num_heads, config.num_kv_heads)
        self.query_key_value = (config.num_heads + config.num_kv_heads, config.num_kv_heads)
        self.spec = _attention_spec(config, layer)
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = MergedLinear(config.hidden_size, parts, bias=config.attention_bias, dtype=dtype, device=device)
        self.o_proj = Linear(
            query_size, config.hidden_size, bias=config.attention_output_bias, dtype=dtype, device=device
        )
        self.head_norm = head_norm

    def forward(
        self, x: torch.Tensor, rotation: Rotation, inputs: AttentionInputs, attention: AttentionBackend
    ) -> torch.Tensor:
        query_key, value = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.query_key_value, dim=1)
        if self.head_norm is not None:
            query_key = self.head_norm(query_key)
        query, key = rotate(query_key, rotation).split(self.query_key, dim=1)
        return self.o_proj(attention.forward(query, key, value, inputs, self.spec).flatten(1))

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the projections and, where there are any, the head norms."""
        self.qkv.load(source, prefix)
        self.o_proj.load(source, f"{prefix}.o_proj")
        if self.head_norm is not None:
            self.head_norm.load(source, prefix)


class DecoderLayer(nn.Module, ABC):
    """One layer of an architecture. Its children are `Loadable` and bear the checkpoint's names."""

    def __init__(
        self, config: TransformerConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()

    @abstractmethod
    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, inputs: AttentionInputs, attention: AttentionBackend
    ) -> torch.Tensor:
        """The residual stream [T, hidden] after this layer, in place of `hidden`."""

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the weights of every child from `{prefix}.{its name}`."""
        for name, child in self.named_children():
            cast(Loadable, child).load(source, f"{prefix}.{name}")


class Transformer(nn.Module):
    """Embedding, layers, final norm and logits head. An architecture subclasses it and names its layer.

    Args: dtype: of weights and activations. device: where they live; "meta" takes no memory and only checks.
    """

    layer_class: ClassVar[type[DecoderLayer]]
    norm_has_unit_offset: ClassVar[bool] = False

    def __init__(self, config: TransformerConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(vocab, hidden, scale=config.embedding_scale, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            self.layer_class(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(
            hidden, config.rms_norm_eps, unit_offset=self.norm_has_unit_offset, dtype=dtype, device=device
        )
        self.lm_head = LogitsHead(
            vocab,
            hidden,
            tied_to=self.embed_tokens if config.tie_word_embeddings else None,
            soft_cap=config.final_soft_cap,
            dtype=dtype,
            device=device,
        )
        self.rotary, self.local_rotary = _rotaries(config, dtype=dtype, device=device)

    def forward(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        hidden = self.embed_tokens(inputs.token_ids)
        rotation = self.rotary(inputs.positions)
        local_rotation = rotation if self.local_rotary is None else self.local_rotary(inputs.positions)
        for layer, window in zip(self.layers, self.config.layer_windows, strict=True):
            hidden = layer(hidden, rotation if window is None else local_rotation, inputs.attention, attention)
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def load(self, source: WeightSource) -> None:
        self.embed_tokens.load(source, "model.embed_tokens")
        for index, layer in enumerate(self.layers):
            cast(Loadable, layer).load(source, f"model.layers.{index}")
        self.norm.load(source, "model.norm")
        self.lm_head.load(source, "lm_head")


def query_key_norm(
    config: TransformerConfig, *, unit_offset: bool = False, dtype: torch.dtype, device: torch.device | str
) -> QueryKeyNorm:
    """The norm of query and key heads of a model that has one."""
    return QueryKeyNorm(
        config.head_dim,
        config.rms_norm_eps,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        unit_offset=unit_offset,
        dtype=dtype,
        device=device,
    )


def gated_mlp(config: TransformerConfig, *, dtype: torch.dtype, device: torch.device | str) -> GatedMLP:
    """The feed-forward network of a model's every layer."""
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        activation=config.activation,
        bias=config.mlp_bias,
        dtype=dtype,
        device=device,
    )


def _attention_spec(config: TransformerConfig, layer: int) -> AttentionSpec:
    return AttentionSpec(
        layer=layer,
        scale=config.attention_scale,
        window=config.layer_windows[layer],
        soft_cap=config.attention_soft_cap,
    )


def _rotaries(
    config: TransformerConfig, *, dtype: torch.dtype, device: torch.device | str
) -> tuple[RotaryEmbedding, RotaryEmbedding | None]:
    """The model's rotary embedding, and the windowed layers' own (never scaled) if they have one."""
    frequencies, magnitude = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    rotary = RotaryEmbedding(frequencies, magnitude, dtype=dtype, device=device)
    if config.rope_local_theta is None:
        return rotary, None
    frequencies, magnitude = rope_frequencies(config.head_dim, config.rope_local_theta, None)
    return rotary, RotaryEmbedding(frequencies, magnitude, dtype=dtype, device=device)
