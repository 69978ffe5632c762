"""Qwen3-MoE: Qwen3 with experts in place of most layers' MLP. Yang et al. 2025, https://arxiv.org/abs/2505.09388."""

from __future__ import annotations

from diptych.models.mixture import MixtureLayer
from diptych.models.transformer import Transformer


class Qwen3MoeLayer(MixtureLayer):
    """Query and key heads are normalised before they rotate."""

    norms_heads = True


class Qwen3MoeModel(Transformer):
    """Qwen3MoeForCausalLM."""

    layer_class = Qwen3MoeLayer
