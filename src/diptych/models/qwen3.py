"""Qwen3 (dense): Llama's layer with query and key heads normalised before rotation.

Yang et al. 2025, https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from diptych.models.llama import LlamaLayer
from diptych.models.transformer import Transformer


class Qwen3Layer(LlamaLayer):
    """Llama's layer, with head norms."""

    norms_heads = True


class Qwen3Model(Transformer):
    """Qwen3ForCausalLM."""

    layer_class = Qwen3Layer
