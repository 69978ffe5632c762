"""Which tensors a Hugging Face checkpoint of a configuration holds, and their shapes. Never imports torch."""

from __future__ import annotations

import re

from diptych.models.config import TransformerConfig

MAX_LAYERS = 4096
"""Far above any model; a damaged configuration must not make us build lists of billions."""

HEAD_NORMS = ("Qwen3ForCausalLM", "Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration")


def tensor_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a Hugging Face checkpoint of this configuration holds, by name."""
    hidden = config.hidden_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    hidden, query, key = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    biases = {
        r"\.[qkv]_proj": config.attention_bias,
        r"\.o_proj": config.attention_output_bias,
        r"^mlp\.": config.mlp_bias,
    }
    for name, shape in list(shapes.items()):
        if any(present and re.search(pattern, name) for pattern, present in biases.items()):
            shapes[name.replace(".weight", ".bias")] = shape[:1]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.architecture.startswith("Gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    if config.architecture in HEAD_NORMS:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes
