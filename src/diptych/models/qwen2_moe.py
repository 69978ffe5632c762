"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and one larger network that all tokens use, behind a gate.

Yang et al. 2024, https://arxiv.org/abs/2407.10671.
"""

from __future__ import annotations

from diptych.models.mixture import MixtureLayer
from diptych.models.transformer import Transformer


class Qwen2MoeLayer(MixtureLayer):
    """The shared network is `shared_expert`, in the singular."""

    shared_name = "shared_expert"


class Qwen2MoeModel(Transformer):
    """Qwen2MoeForCausalLM."""

    layer_class = Qwen2MoeLayer
