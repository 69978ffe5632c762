"""Which tensors a Hugging Face checkpoint of a configuration holds, and their shapes. Never imports torch."""

from __future__ import annotations

from diptych.models.config import TransformerConfig

MAX_LAYERS = 4096
"""Far above any model; a damaged configuration must not make us build lists of billions."""

HEAD_NORMS = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3TextModel",
    "Gemma3ForConditionalGeneration",
)

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: TransformerConfig) -> Shapes:
    """Shape of every tensor that a Hugging Face checkpoint of this configuration holds, by name.

    Layers that predict further tokens are left out.
    """
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        attention = _attention_shapes(config) if config.latent is None else _latent_shapes(config)
        network = _expert_shapes(config) if config.has_experts(layer) else _mlp_shapes(config, "mlp")
        for name, shape in (attention | network | _norm_shapes(config)).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def draft_layer_prefixes(config: TransformerConfig) -> tuple[str, ...]:
    """How the names of tensors begin that belong to layers beyond the model's own, which predict further tokens (MTP).

    Such a layer has an own layer's tensors, and `enorm`, `hnorm`, `eh_proj`, `shared_head.norm`, `shared_head.head` and
    `embed_tokens` beside them.
    """
    return tuple(f"model.layers.{config.num_layers + index}." for index in range(config.num_draft_layers))


def _attention_shapes(config: TransformerConfig) -> Shapes:
    hidden, query, key = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if config.attention_bias:
        shapes |= {f"self_attn.{part}_proj.bias": (query if part == "q" else key,) for part in "qkv"}
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.architecture in HEAD_NORMS:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _latent_shapes(config: TransformerConfig) -> Shapes:
    latent, hidden = config.latent, config.hidden_size
    assert latent is not None, "only latent attention has these"
    query, values = config.num_heads * (latent.nope_dim + latent.rope_dim), config.num_heads * latent.value_dim
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.row_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.kv_b_proj.weight": (config.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "self_attn.o_proj.weight": (hidden, values),
    }
    biased = ["kv_a_proj_with_mqa", "o_proj"]
    if latent.query_rank is None:
        shapes["self_attn.q_proj.weight"] = (query, hidden)
    else:
        biased.append("q_a_proj")
        shapes["self_attn.q_a_proj.weight"] = (latent.query_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        shapes["self_attn.q_b_proj.weight"] = (query, latent.query_rank)
    if config.attention_bias:
        shapes |= {f"self_attn.{name}.bias": shapes[f"self_attn.{name}.weight"][:1] for name in biased}
    return shapes


def _mlp_shapes(config: TransformerConfig, name: str, inner: int | None = None) -> Shapes:
    hidden, inner = config.hidden_size, inner or config.intermediate_size
    shapes: Shapes = {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }
    if config.mlp_bias:
        shapes |= {weight.replace(".weight", ".bias"): shape[:1] for weight, shape in list(shapes.items())}
    return shapes


def _expert_shapes(config: TransformerConfig) -> Shapes:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None, "only a mixture of experts has these"
    is_mixtral = config.architecture == "MixtralForCausalLM"
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    routing, inner = experts.routing, experts.intermediate_size
    shapes: Shapes = {f"{block}.gate.weight": (routing.num_experts, hidden)}
    if routing.has_bias:
        shapes[f"{block}.gate.e_score_correction_bias"] = (routing.num_experts,)
    for expert in range(routing.num_experts):
        shapes |= {f"{block}.experts.{expert}.{name}.weight": (inner, hidden) for name in (gate, up)}
        shapes[f"{block}.experts.{expert}.{down}.weight"] = (hidden, inner)
    if experts.shared_size:
        name = "shared_expert" if experts.has_shared_gate else "shared_experts"
        shapes |= _mlp_shapes(config, f"{block}.{name}", experts.shared_size)
    if experts.has_shared_gate:
        shapes[f"{block}.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _norm_shapes(config: TransformerConfig) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.architecture.startswith("Gemma3"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (config.hidden_size,) for name in names}
