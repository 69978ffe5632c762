"""DeepSeek V2 and V3 (and R1): latent attention, and experts chosen within groups, beside one that all tokens use.

What differs between the two is in their configurations. Layers that predict further tokens (MTP) are not loaded.
DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434 and https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import torch

from diptych.models.config import TransformerConfig
from diptych.models.latent_attention import LatentAttention
from diptych.models.mixture import MixtureLayer
from diptych.models.transformer import Transformer
from diptych.parallel.groups import GroupCoordinator


class DeepseekLayer(MixtureLayer):
    """The mixture's layer, with latent attention."""

    def _attention(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        group: GroupCoordinator,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> torch.nn.Module:
        return LatentAttention(config, layer, group=group, dtype=dtype, device=device)


class DeepseekModel(Transformer):
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM."""

    layer_class = DeepseekLayer
