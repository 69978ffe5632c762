"""Mixtral: Mistral with a mixture of experts in every layer. Jiang et al. 2024, https://arxiv.org/abs/2401.04088."""

from __future__ import annotations

from diptych.models.mixture import MixtureLayer
from diptych.models.transformer import Transformer


class MixtralLayer(MixtureLayer):
    """The checkpoint has names of its own for the mixture: gate, up and down are w1, w3 and w2."""

    mixture_name = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")


class MixtralModel(Transformer):
    """MixtralForCausalLM."""

    layer_class = MixtralLayer
