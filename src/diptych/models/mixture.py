"""The layer of models whose feed-forward network is a mixture of experts in some layers. Device side."""

from __future__ import annotations

from typing import ClassVar, cast

import torch

from diptych.attention.backend import AttentionBackend, AttentionInputs
from diptych.layers.mlp import GatedMLP
from diptych.layers.moe import Experts, MoE, Router
from diptych.layers.norm import RMSNorm
from diptych.layers.rotary import Rotation
from diptych.layers.weights import WeightSource
from diptych.models.config import TransformerConfig
from diptych.models.transformer import (
    DecoderLayer,
    LayerBlocks,
    Loadable,
    SelfAttention,
    gated_mlp,
    query_key_norm,
)
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ONE_RANK, LayerGroups


class MixtureLayer(DecoderLayer):
    """Llama's layer, with a mixture of experts where the configuration has one.

    mixture_name: of the mixture in the checkpoint. expert_names: of an expert's gate, up and down. shared_name: of the
    network that all tokens use.
    """

    norms_heads: ClassVar[bool] = False
    mixture_name: ClassVar[str] = "mlp"
    expert_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    shared_name: ClassVar[str] = "shared_experts"

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
        if config.has_experts(layer):
            self.mlp: GatedMLP | MoE = self._mixture(config, groups, dtype=dtype, device=device)
        else:
            self.mlp = gated_mlp(config, group=groups.tensor, dtype=dtype, device=device)

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

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read every child's weights; a mixture may have a name of its own."""
        for name, child in self.named_children():
            stored = self.mixture_name if child is self.mlp and isinstance(child, MoE) else name
            cast(Loadable, child).load(source, f"{prefix}.{stored}")

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

    def _mixture(
        self, config: TransformerConfig, groups: LayerGroups, *, dtype: torch.dtype, device: torch.device | str
    ) -> MoE:
        experts = config.experts
        assert experts is not None, "a layer has experts only where the configuration has some"
        hidden = config.hidden_size
        shared = (
            GatedMLP(
                hidden,
                experts.shared_size,
                activation=config.activation,
                bias=config.mlp_bias,
                group=groups.tensor,
                dtype=dtype,
                device=device,
            )
            if experts.shared_size
            else None
        )
        return MoE(
            Router(hidden, experts.routing, dtype=dtype, device=device),
            Experts(
                experts.routing.num_experts,
                (hidden, experts.intermediate_size),
                activation=config.activation,
                names=self.expert_names,
                groups=groups,
                dtype=dtype,
                device=device,
            ),
            shared=shared,
            shared_name=self.shared_name,
            has_shared_gate=experts.has_shared_gate,
            group=groups.tensor,
            dtype=dtype,
            device=device,
        )
