"""Gemma 3, text only: norms before and after both blocks, head norms, a scaled embedding, windows in most layers.

Windowed layers have a rotary base of their own; every norm has Gemma's (1 + weight) form.
Gemma Team 2025, https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

import torch

from diptych.attention.backend import AttentionBackend, AttentionInputs
from diptych.layers.norm import RMSNorm
from diptych.layers.rotary import Rotation
from diptych.models.config import TransformerConfig
from diptych.models.transformer import (
    DecoderLayer,
    LayerBlocks,
    SelfAttention,
    Transformer,
    gated_mlp,
    query_key_norm,
)
from diptych.parallel.layer_groups import ONE_RANK, LayerGroups


class Gemma3Layer(DecoderLayer):
    """Attention, then MLP: each reads the normalised stream, and its output is normalised again before it is added."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        groups: LayerGroups = ONE_RANK,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(config, layer, groups=groups, dtype=dtype, device=device)

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=True, dtype=dtype, device=device)

        self.input_layernorm = norm()
        group = groups.attention
        head_norm = query_key_norm(config, unit_offset=True, group=group, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, layer, head_norm=head_norm, group=group, dtype=dtype, device=device)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = gated_mlp(config, group=groups.tensor, dtype=dtype, device=device)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, inputs: AttentionInputs, attention: AttentionBackend
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rotation, inputs, attention)
        self.post_attention_layernorm.add_to(hidden, attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        return self.post_feedforward_layernorm.add_to(hidden, fed_forward)

    def blocks(self) -> LayerBlocks:
        return LayerBlocks(
            attention=self.self_attn,
            mlp=self.mlp,
            input_norm=self.input_layernorm,
            post_attention_norm=self.post_attention_layernorm,
            mlp_norm=self.pre_feedforward_layernorm,
            post_mlp_norm=self.post_feedforward_layernorm,
        )


class Gemma3Model(Transformer):
    """Gemma3ForCausalLM, and the text part of Gemma3ForConditionalGeneration."""

    layer_class = Gemma3Layer
    norm_has_unit_offset = True
