"""The decoder-only transformer that every architecture here is a variation of.

Owns the walk from token ids to hidden states and logits, the attention block, and the way from checkpoint names to
layers: children are named as in the checkpoint. An architecture's own file says what one layer computes, in which
order. Knows nothing of requests, scheduling or ranks.

T = tokens in the step, R = rows whose logits are wanted, H = query heads, G = KV heads, D = head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import nn

from diptych.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec, ForwardInputs
from diptych.attention.cpu import CPUAttention
from diptych.kernels.decoder_layer import FusedLayer, LayerParts
from diptych.kernels.linear import Quantization
from diptych.kernels.norm import FusedHeads, can_normalize
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

    fused_heads: FusedHeads | None = None

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
        self.num_heads = config.num_heads
        self.query_key_value = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
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
        projected = self.qkv(x)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        if self.fused_heads is not None:
            self.fused_heads(projected, *rotation)
            query, key, value = heads.split(self.query_key_value, dim=1)
        else:
            query, key, value = self._normed_and_rotated(heads, rotation)
        return self.o_proj(attention.forward(query, key, value, inputs, self.spec).flatten(1))

    def _normed_and_rotated(
        self, heads: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value; the first two as attention wants them."""
        num_heads, num_kv_heads, _ = self.query_key_value
        query_key, value = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if self.head_norm is not None:
            query_key = self.head_norm(query_key)
        query, key = rotate(query_key, rotation).split((num_heads, num_kv_heads), dim=1)
        return query, key, value

    def pack(self, quantization: Quantization = "none") -> None:
        """Use the CPU kernel for what happens to heads before attention, if there is one; it is never quantised."""
        if self.fused_heads is not None or not can_normalize(self.qkv.weight):
            return
        num_heads, num_kv_heads, _ = self.query_key_value
        self.fused_heads = FusedHeads(
            num_heads + num_kv_heads,
            self.head_dim,
            weight=None if self.head_norm is None else self.head_norm.weight.data,
            eps=0.0 if self.head_norm is None else self.head_norm.eps,
            dtype=self.qkv.weight.dtype,
        )

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the projections and, where there are any, the head norms."""
        self.qkv.load(source, prefix)
        self.o_proj.load(source, f"{prefix}.o_proj")
        if self.head_norm is not None:
            self.head_norm.load(source, prefix)


@runtime_checkable
class Packable(Protocol):
    """A layer that the CPU kernels can run faster once its weights are in their order."""

    def pack(self, quantization: Quantization = "none") -> None: ...


class DecoderLayer(nn.Module, ABC):
    """One layer of an architecture. Its children are `Loadable` and bear the checkpoint's names."""

    self_attn: SelfAttention

    def __init__(
        self, config: TransformerConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.fused: FusedLayer | None = None

    @abstractmethod
    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, inputs: AttentionInputs, attention: AttentionBackend
    ) -> torch.Tensor:
        """The residual stream [T, hidden] after this layer, in place of `hidden`."""

    def parts(self) -> LayerParts | None:
        """The same layer as the CPU kernels compute it in one call; None if they cannot, or if a part is not packed."""
        return None

    def fuse(self) -> None:
        """Once the parts are packed: run as one kernel, where there is one."""
        parts = self.parts()
        if self.fused is None and parts is not None and parts.has_whole_tiles:
            self.fused = FusedLayer(parts)

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
            hidden = _run_layer(layer, hidden, rotation if window is None else local_rotation, inputs, attention)
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    @property
    def is_fused(self) -> bool:
        """Whether every layer runs as one kernel, which leaves next to nothing for torch to compute."""
        return all(cast(DecoderLayer, layer).fused is not None for layer in self.layers)

    def pack(self, quantization: Quantization = "none", progress: Callable[[int, int], None] | None = None) -> None:
        """Hand every layer to the CPU kernels, where there are any: weights are reordered in place, for good.

        Args: quantization: "int8" rounds the weights of bfloat16 linear layers and of the embedding to 8 bits.
        progress: told modules done, and all.
        """
        modules = [module for module in self.modules() if module is not self and isinstance(module, Packable)]
        for done, module in enumerate(modules, start=1):
            module.pack(quantization)
            if progress is not None:
                progress(done, len(modules))
        for layer in self.layers:
            cast(DecoderLayer, layer).fuse()

    def load(self, source: WeightSource) -> None:
        self.embed_tokens.load(source, "model.embed_tokens")
        for index, layer in enumerate(self.layers):
            cast(Loadable, layer).load(source, f"model.layers.{index}")
        self.norm.load(source, "model.norm")
        self.lm_head.load(source, "lm_head")


def _run_layer(
    layer: nn.Module, hidden: torch.Tensor, rotation: Rotation, inputs: ForwardInputs, attention: AttentionBackend
) -> torch.Tensor:
    """One layer: as a single kernel if it has been fused and the attention is that kernel's, else part by part."""
    layer = cast(DecoderLayer, layer)
    if layer.fused is None or not isinstance(attention, CPUAttention):
        return layer(hidden, rotation, inputs.attention, attention)
    block = layer.self_attn
    return attention.run_layer(
        layer.fused, hidden, rotation=rotation, inputs=inputs.attention, spec=block.spec, num_heads=block.num_heads
    )


def layer_parts(
    attention: SelfAttention,
    mlp: GatedMLP,
    *,
    input_norm: RMSNorm,
    mlp_norm: RMSNorm,
    post_attention_norm: RMSNorm | None = None,
    post_mlp_norm: RMSNorm | None = None,
) -> LayerParts | None:
    """A layer's packed parts, for one that normalises the inputs of its blocks and maybe their outputs.

    None if a part is not packed.
    """
    linears = (attention.qkv.packed, attention.o_proj.packed, mlp.gate_up.packed, mlp.down.packed)
    qkv, output, gate_up, down = linears
    before_attention, before_mlp, heads = input_norm.fused, mlp_norm.fused, attention.fused_heads
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    if before_attention is None or before_mlp is None or heads is None:
        return None
    return LayerParts(
        input_norm=before_attention,
        query_key_value=qkv,
        heads=heads,
        attention_output=output,
        post_attention_norm=None if post_attention_norm is None else post_attention_norm.fused,
        mlp_norm=before_mlp,
        gate_up=gate_up,
        down=down,
        post_mlp_norm=None if post_mlp_norm is None else post_mlp_norm.fused,
    )


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
