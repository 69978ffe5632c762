"""The decoder-only transformer that every architecture here is a variation of.

Owns the walk from token ids to hidden states and logits, the attention block, and the way from checkpoint names to
layers: children are named as in the checkpoint. An architecture's own file says what one layer computes, in which
order. Knows nothing of requests, scheduling or ranks.

T = tokens in the step, R = rows whose logits are wanted, H = query heads, G = KV heads, D = head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import nn

from diptych.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec, ForwardInputs
from diptych.attention.cpu import CPUAttention
from diptych.errors import ConfigError
from diptych.kernels.decoder_layer import FusedLayer, FusedStack, LayerParts
from diptych.kernels.linear import Quantization
from diptych.kernels.low_rank import AdaptedLayer
from diptych.kernels.memory import give_back_heap
from diptych.kernels.norm import FusedHeads, can_normalize
from diptych.kv.layout import stage_layers
from diptych.layers.embedding import Embedding
from diptych.layers.linear import Linear, MergedLinear, RowLinear
from diptych.layers.logits import LogitsHead
from diptych.layers.lora import ActiveAdapters
from diptych.layers.mlp import GatedMLP
from diptych.layers.moe import MoE
from diptych.layers.norm import QueryKeyNorm, RMSNorm
from diptych.layers.rotary import RotaryEmbedding, Rotation, rotate
from diptych.layers.shard import even_share, kv_head_share
from diptych.layers.weights import WeightSource
from diptych.models.config import TransformerConfig
from diptych.models.rope import rope_frequencies
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE, ONE_RANK, LayerGroups


class Model(Protocol):
    """What a worker asks of a model."""

    config: TransformerConfig

    def load(self, source: WeightSource) -> None:
        """Read every weight. Raises ConfigError naming a tensor that is missing or has the wrong shape."""
        ...

    def forward(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states after the last norm, [T, hidden], in the model's dtype."""
        ...

    def forward_logit_rows(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        """Those of `inputs.logit_rows` alone, [R, hidden]."""
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
    group: ranks that share the heads.
    """

    fused_heads: FusedHeads | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        head_norm: QueryKeyNorm | None = None,
        group: GroupCoordinator = ALONE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = even_share(config.num_heads, group, "attention heads")
        kv_heads = kv_head_share(config.num_kv_heads, group)
        self.num_heads = len(heads)
        self.query_key_value = (len(heads), len(kv_heads), len(kv_heads))
        self.spec = _attention_spec(config, layer)
        queries, keys = heads.times(config.head_dim), kv_heads.times(config.head_dim)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv = MergedLinear(config.hidden_size, parts, bias=config.attention_bias, dtype=dtype, device=device)
        self.o_proj = RowLinear(
            queries, config.hidden_size, group=group, bias=config.attention_output_bias, dtype=dtype, device=device
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlocks:
    """A layer that normalises the inputs of its two blocks, and maybe their outputs before it adds them.

    post_attention_norm, post_mlp_norm: what a block's output is normalised with; None where it is added as it is.
    """

    attention: SelfAttention
    mlp: GatedMLP | MoE
    input_norm: RMSNorm
    mlp_norm: RMSNorm
    post_attention_norm: RMSNorm | None = None
    post_mlp_norm: RMSNorm | None = None


class DecoderLayer(nn.Module, ABC):
    """One layer of an architecture. Its children are `Loadable` and bear the checkpoint's names.

    Args: layer: its number in the model. groups: ranks that share it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        groups: LayerGroups = ONE_RANK,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.fused: FusedLayer | None = None

    @abstractmethod
    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, inputs: AttentionInputs, attention: AttentionBackend
    ) -> torch.Tensor:
        """The residual stream [T, hidden] after this layer, in place of `hidden`."""

    @abstractmethod
    def blocks(self) -> LayerBlocks | None:
        """The same layer as data, for what computes it with fewer, larger kernels; None where it has other parts."""

    def fuse(self) -> None:
        """Once the parts are packed: run as one kernel, where there is one."""
        blocks = self.blocks()
        parts = None if blocks is None else layer_parts(blocks)
        if self.fused is None and parts is not None and parts.has_whole_tiles:
            self.fused = FusedLayer(parts)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the weights of every child from `{prefix}.{its name}`."""
        for name, child in self.named_children():
            cast(Loadable, child).load(source, f"{prefix}.{name}")


class Transformer(nn.Module):
    """Embedding, layers, final norm and logits head. An architecture subclasses it and names its layer.

    Args: groups: ranks that the model is spread over; each holds its share of every layer of its stage. The first stage
    has the embedding, the last one the norm and the head. dtype: of weights and activations. device: where they live;
    "meta" takes no memory and only checks.
    """

    layer_class: ClassVar[type[DecoderLayer]]
    norm_has_unit_offset: ClassVar[bool] = False

    embed_tokens: Embedding
    norm: RMSNorm
    lm_head: LogitsHead

    def __init__(
        self,
        config: TransformerConfig,
        *,
        groups: LayerGroups = ONE_RANK,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.config, self.groups = config, groups
        if groups.expert.size > 1 and config.experts is None:
            raise ConfigError(
                f"ep_size is {groups.expert.size}, but {config.architecture} has no experts to deal out; leave it out"
            )
        stages = groups.pipeline
        self.layer_ids = stage_layers(config.num_layers, stages.rank, stages.size)
        if stages.is_first:
            self.embed_tokens = self._embedding(dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            self.layer_class(config, layer, groups=groups, dtype=dtype, device=device) for layer in self.layer_ids
        )
        if stages.is_last:
            self._add_end(dtype=dtype, device=device)
        self.rotary, self.local_rotary = _rotaries(config, dtype=dtype, device=device)
        self._stack: tuple[CPUAttention, FusedStack] | None = None
        self._active_adapters: ActiveAdapters | None = None
        self._adapted_layers: list[AdaptedLayer] | None = None

    def take_adapters(self, active: ActiveAdapters, layers: list[AdaptedLayer] | None) -> None:
        """Have steps look at `active` from now on. layers: the same for layers that run as one kernel each."""
        self._active_adapters, self._adapted_layers, self._stack = active, layers, None

    def _embedding(self, *, dtype: torch.dtype, device: torch.device | str) -> Embedding:
        config = self.config
        return Embedding(
            config.vocab_size,
            config.hidden_size,
            scale=config.embedding_scale,
            group=self.groups.tensor,
            dtype=dtype,
            device=device,
        )

    def _add_end(self, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """The last stage's norm and head; where the head is tied to an embedding of the first stage, with a copy."""
        config = self.config
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, unit_offset=self.norm_has_unit_offset, dtype=dtype, device=device
        )
        is_tied_here = config.tie_word_embeddings and self.groups.pipeline.size == 1
        self.lm_head = LogitsHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.embed_tokens if is_tied_here else None,
            soft_cap=config.final_soft_cap,
            group=self.groups.tensor,
            dtype=dtype,
            device=device,
        )

    def forward(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        return self.norm(self.run_layers(self.embed_tokens(inputs.token_ids), inputs, attention))

    def forward_logit_rows(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        hidden = self.embed_tokens(inputs.token_ids)
        return self.norm(self.run_layers(hidden, inputs, attention, wanted=inputs.logit_rows))

    def run_layers(
        self,
        hidden: torch.Tensor,
        inputs: ForwardInputs,
        attention: AttentionBackend,
        *,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream [T, hidden] after this stage's layers; may be in place. wanted: of these tokens alone."""
        rotations = [rotary(inputs.positions) for rotary in (self.rotary, self.local_rotary) if rotary is not None]
        if isinstance(attention, CPUAttention) and (stack := self._stack_on(attention)) is not None:
            step = None if self._active_adapters is None else self._active_adapters.step
            adapters = None if step is None else step.of_stack(wanted)
            return attention.run_stack(stack, hidden, rotations, inputs.attention, wanted=wanted, adapters=adapters)
        for layer, rotation in zip(self.layers, self._rotation_of_layer(), strict=True):
            hidden = layer(hidden, rotations[rotation], inputs.attention, attention)
        return hidden if wanted is None else hidden[wanted]

    def _rotation_of_layer(self) -> list[int]:
        """Which rotary embedding each of the layers here uses: 0, or 1 for the windowed layers' own."""
        has_own = self.local_rotary is not None
        return [int(has_own and self.config.layer_windows[layer] is not None) for layer in self.layer_ids]

    def _stack_on(self, attention: CPUAttention) -> FusedStack | None:
        """All layers as one kernel over this attention's pool, if all are fused."""
        if self._stack is None or self._stack[0] is not attention:
            if not self.is_fused:
                return None
            stacked = [
                attention.stacked(
                    layer.fused,
                    blocks.attention.spec,
                    num_heads=blocks.attention.num_heads,
                    rotation=index,
                    adapted=None if self._adapted_layers is None else self._adapted_layers[place],
                )
                for place, (layer, index) in enumerate(
                    zip(cast(list[DecoderLayer], self.layers), self._rotation_of_layer(), strict=True)
                )
                if layer.fused is not None and (blocks := layer.blocks()) is not None
            ]
            self._stack = (attention, FusedStack(stacked))
        return self._stack[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Each row's likeliest token and its logit; None where only `logits` can tell."""
        return self.lm_head.likeliest(hidden)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.layers.parameters()).device

    @property
    def layer_blocks(self) -> list[LayerBlocks] | None:
        """Every layer as data; None if one of them has other parts."""
        found = [cast(DecoderLayer, layer).blocks() for layer in self.layers]
        known = [blocks for blocks in found if blocks is not None]
        return known if len(known) == len(found) else None

    @property
    def is_fused(self) -> bool:
        """Whether every layer runs as one kernel."""
        return all(cast(DecoderLayer, layer).fused is not None for layer in self.layers)

    @property
    def is_packed(self) -> bool:
        """Whether the CPU kernels compute its large products, which leaves little for torch."""
        return any(isinstance(module, Linear) and module.packed is not None for module in self.layers.modules())

    def pack(self, quantization: Quantization = "none") -> None:
        """Hand every layer to the CPU kernels, where there are any: weights are reordered in place, for good.

        Args: quantization: "int8" rounds the weights of bfloat16 linear layers and of the embedding to 8 bits.
        """
        for part in self._parts().values():
            _pack(part, quantization)

    def load(self, source: WeightSource, *, pack_as: Quantization | None = None) -> None:
        """Read all weights. pack_as: `pack` each part as soon as it is read, so that only one takes memory twice."""
        for prefix, part in self._parts().items():
            cast(Loadable, part).load(source, prefix)
            if pack_as is not None:
                _pack(part, pack_as)

    def _parts(self) -> dict[str, nn.Module]:
        """By their names in a checkpoint; the head next to a table that it may share, to let go of the unpacked one."""
        parts: dict[str, nn.Module] = {}
        stages = self.groups.pipeline
        if stages.is_first:
            parts["model.embed_tokens"] = self.embed_tokens
        if stages.is_last:
            has_copy = self.config.tie_word_embeddings and not self.lm_head.is_tied
            parts["model.embed_tokens" if has_copy else "lm_head"] = self.lm_head
        parts |= {f"model.layers.{index}": layer for index, layer in zip(self.layer_ids, self.layers, strict=True)}
        if stages.is_last:
            parts["model.norm"] = self.norm
        return parts


def _pack(part: nn.Module, quantization: Quantization) -> None:
    """Hand all of a part to the CPU kernels."""
    for module in part.modules():
        if isinstance(module, Packable):
            module.pack(quantization)
    if isinstance(part, DecoderLayer):
        part.fuse()
    give_back_heap()


def layer_parts(blocks: LayerBlocks) -> LayerParts | None:
    """A layer's packed parts, as the CPU kernels compute it in one call; None if a part is not packed or not whole."""
    attention, mlp = blocks.attention, blocks.mlp
    if isinstance(mlp, MoE):
        return None
    if attention.o_proj.group.size > 1 or mlp.down.group.size > 1:
        return None  # ranks add up their parts between the kernels
    linears = (attention.qkv.packed, attention.o_proj.packed, mlp.gate_up.packed, mlp.down.packed)
    qkv, output, gate_up, down = linears
    before_attention, before_mlp, heads = blocks.input_norm.fused, blocks.mlp_norm.fused, attention.fused_heads
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    if before_attention is None or before_mlp is None or heads is None:
        return None
    after_attention, after_mlp = blocks.post_attention_norm, blocks.post_mlp_norm
    return LayerParts(
        input_norm=before_attention,
        query_key_value=qkv,
        heads=heads,
        attention_output=output,
        post_attention_norm=None if after_attention is None else after_attention.fused,
        mlp_norm=before_mlp,
        gate_up=gate_up,
        down=down,
        post_mlp_norm=None if after_mlp is None else after_mlp.fused,
    )


def query_key_norm(
    config: TransformerConfig,
    *,
    unit_offset: bool = False,
    group: GroupCoordinator = ALONE,
    dtype: torch.dtype,
    device: torch.device | str,
) -> QueryKeyNorm:
    """The norm of query and key heads of a model that has one. group: ranks that share the heads."""
    return QueryKeyNorm(
        config.head_dim,
        config.rms_norm_eps,
        num_heads=len(even_share(config.num_heads, group, "attention heads")),
        num_kv_heads=len(kv_head_share(config.num_kv_heads, group)),
        unit_offset=unit_offset,
        dtype=dtype,
        device=device,
    )


def gated_mlp(
    config: TransformerConfig, *, group: GroupCoordinator = ALONE, dtype: torch.dtype, device: torch.device | str
) -> GatedMLP:
    """The feed-forward network of a model's every layer. group: ranks that share it."""
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        activation=config.activation,
        bias=config.mlp_bias,
        group=group,
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
    if config.latent is not None:
        return RotaryEmbedding(
            frequencies,
            magnitude,
            is_interleaved=config.latent.is_interleaved,
            dtype=torch.float32,  # as DeepSeek rotates: rounded once
            device=device,
        ), None
    rotary = RotaryEmbedding(frequencies, magnitude, dtype=dtype, device=device)
    if config.rope_local_theta is None:
        return rotary, None
    frequencies, magnitude = rope_frequencies(config.head_dim, config.rope_local_theta, None)
    return rotary, RotaryEmbedding(frequencies, magnitude, dtype=dtype, device=device)
