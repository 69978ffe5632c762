"""Llama 1 to 3.x, and Mistral, which differs in its config only (a sliding window in every layer).

Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Jiang et al. 2023, https://arxiv.org/abs/2310.06825.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from diptych.attention.backend import AttentionBackend, AttentionInputs
from diptych.layers.mlp import GatedMLP
from diptych.layers.moe import MoE
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
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ONE_RANK, LayerGroups


class LlamaLayer(DecoderLayer):
    """Attention, then MLP, each on the normalised stream and added to it."""

    norms_heads: ClassVar[bool] = False

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
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = self._attention(config, layer, group=groups.attention, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = self._feed_forward(config, layer, groups=groups, dtype=dtype, device=device)

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, inputs: AttentionInputs, attention: AttentionBackend
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rotation, inputs, attention)
        return hidden.add_(self.mlp(self.post_attention_layernorm.after_adding(hidden, attended)))

    def blocks(self) -> LayerBlocks | None:
        if not isinstance(self.self_attn, SelfAttention):
            return None
        return LayerBlocks(
            attention=self.self_attn,
            mlp=self.mlp,
            input_norm=self.input_layernorm,
            mlp_norm=self.post_attention_layernorm,
        )

    def _attention(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        group: GroupCoordinator,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> torch.nn.Module:
        head_norm = query_key_norm(config, group=group, dtype=dtype, device=device) if self.norms_heads else None
        return SelfAttention(config, layer, head_norm=head_norm, group=group, dtype=dtype, device=device)

    def _feed_forward(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        groups: LayerGroups,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> GatedMLP | MoE:
        return gated_mlp(config, group=groups.tensor, dtype=dtype, device=device)


class LlamaModel(Transformer):
    """LlamaForCausalLM and MistralForCausalLM."""

    layer_class = LlamaLayer
