"""Qwen2 and Qwen2.5: Llama's layer with biases on query, key and value (the config's `attention_bias`).

Yang et al. 2024, https://arxiv.org/abs/2407.10671.
"""

from __future__ import annotations

from diptych.models.llama import LlamaLayer
from diptych.models.transformer import Transformer


class Qwen2Model(Transformer):
    """Qwen2ForCausalLM."""

    layer_class = LlamaLayer
