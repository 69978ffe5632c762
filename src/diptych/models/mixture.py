"""The layer of models whose feed-forward network is a mixture of experts in some layers. Device side."""

from __future__ import annotations

from typing import ClassVar, cast

import torch

from diptych.layers.mlp import GatedMLP
from diptych.layers.moe import Experts, MoE, Router
from diptych.layers.weights import WeightSource
from diptych.models.config import TransformerConfig
from diptych.models.llama import LlamaLayer
from diptych.models.transformer import Loadable
from diptych.parallel.layer_groups import LayerGroups


class MixtureLayer(LlamaLayer):
    """Llama's layer, with a mixture of experts where the configuration has one.

    mixture_name: of the mixture in the checkpoint. expert_names: of an expert's gate, up and down. shared_name: of the
    network that all tokens use.
    """

    mixture_name: ClassVar[str] = "mlp"
    expert_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    shared_name: ClassVar[str] = "shared_experts"

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read every child's weights; a mixture may have a name of its own."""
        for name, child in self.named_children():
            stored = self.mixture_name if child is self.mlp and isinstance(child, MoE) else name
            cast(Loadable, child).load(source, f"{prefix}.{stored}")

    def _feed_forward(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        groups: LayerGroups,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> GatedMLP | MoE:
        if config.has_experts(layer):
            return self._mixture(config, groups, dtype=dtype, device=device)
        return super()._feed_forward(config, layer, groups=groups, dtype=dtype, device=device)

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
