"""What config.json of a Hugging Face folder says about a model: its TransformerConfig.

Owns the many spellings that config.json has had (rope_scaling and rope_parameters, torch_dtype and dtype, layer_types
and sliding_window_pattern) and the defaults that published configs leave out. Never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from diptych.errors import ConfigError
from diptych.models.config import RopeScaling, TransformerConfig
from diptych.models.expert_fields import LATENT, experts_config, latent_config, latent_scale, yarn_magnitude
from diptych.models.json_fields import Fields, read_json
from diptych.models.registry import MODELS
from diptych.models.shapes import MAX_LAYERS

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
DTYPES = ("bfloat16", "float16", "float32")
GEMMA3_THETA = 1000000.0
GEMMA3_LOCAL_THETA = 10000.0
GEMMA3_PATTERN = 6
NEVER_BIASED = ("mistral", "mixtral", "qwen2", "qwen2_moe")

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a key means when config.json leaves it out, per model type; None: it must be there or follows from others.

    query_bias: biases on q, k and v whatever attention_bias says. windows: how sliding_window applies to layers.
    """

    architecture: str
    num_heads: int = 32
    num_kv_heads: int | None = 32
    head_dim: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None
    query_bias: bool = False
    tied: bool = False
    activation: str = "silu"
    sliding_window: int | None = None
    windows: Literal["none", "all", "switched", "late", "pattern"] = "none"


MODEL_TYPES = {
    "llama": Defaults(architecture="LlamaForCausalLM", num_kv_heads=None),
    "mistral": Defaults(architecture="MistralForCausalLM", num_kv_heads=8, windows="all", sliding_window=4096),
    "qwen2": Defaults(architecture="Qwen2ForCausalLM", query_bias=True, windows="late", sliding_window=4096),
    "qwen3": Defaults(architecture="Qwen3ForCausalLM", head_dim=128, windows="late", sliding_window=4096),
    "mixtral": Defaults(architecture="MixtralForCausalLM", num_kv_heads=8, vocab_size=32000, windows="all"),
    "qwen2_moe": Defaults(
        architecture="Qwen2MoeForCausalLM",
        num_heads=16,
        num_kv_heads=16,
        query_bias=True,
        windows="late",
        sliding_window=4096,
    ),
    "qwen3_moe": Defaults(architecture="Qwen3MoeForCausalLM", num_kv_heads=4, windows="switched", sliding_window=4096),
    "deepseek_v2": Defaults(architecture="DeepseekV2ForCausalLM"),
    "deepseek_v3": Defaults(architecture="DeepseekV3ForCausalLM", num_heads=128),
    "gemma3_text": Defaults(
        architecture="Gemma3ForCausalLM",
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        vocab_size=262208,
        max_positions=131072,
        tied=True,
        activation="gelu_pytorch_tanh",
        sliding_window=4096,
        windows="pattern",
    ),
}


def config_from_folder(folder: Path) -> TransformerConfig:
    """The configuration in a folder's config.json and generation_config.json.

    Raises ConfigError for a missing or damaged file, an unsupported architecture, quantisation or rotary scaling, and
    for values that cannot be.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {CONFIG_NAME}; name a folder that holds a Hugging Face model, or a GGUF file."
        )
    fields = Fields(read_json(path), str(path))
    generation_path = folder / GENERATION_CONFIG_NAME
    generation = Fields(read_json(generation_path) if generation_path.is_file() else {}, str(generation_path))
    return config_from_fields(fields, generation)


def draft_config_from_folder(folder: Path) -> TransformerConfig:
    """The configuration of a head of one Llama layer, whatever its config.json calls the architecture.

    Raises ConfigError as `config_from_folder` does.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(f"{folder} has no {CONFIG_NAME}; name a folder that holds an EAGLE head.")
    content = read_json(path) | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return config_from_fields(Fields(content, str(path)), Fields({}, str(path)))


def config_from_fields(fields: Fields, generation: Fields) -> TransformerConfig:
    """As `config_from_folder`, of parsed files."""
    architecture, text = _architecture(fields)
    model_type = text.text("model_type") or fields.text("model_type") or ""
    _check_quantization(fields, text)
    defaults = MODEL_TYPES.get(model_type)
    if defaults is None:
        raise text.wrong("model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
    num_layers = text.size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise text.wrong("num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    num_heads = text.size("num_attention_heads", defaults.num_heads)
    latent = latent_config(text, model_type)
    num_kv_heads, head_dim = _heads(text, defaults, num_heads) if latent is None else (1, latent.rope_dim)
    hidden_size = text.size("hidden_size")
    gemma = model_type == "gemma3_text"
    rope = _Rope(text, gemma=gemma)
    bias = text.flag("attention_bias", False) and model_type not in NEVER_BIASED
    return TransformerConfig(
        architecture=architecture,
        model_type=model_type,
        vocab_size=text.size("vocab_size", defaults.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=text.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_max_positions(text, rope.scaling, defaults),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_local_theta=rope.local_theta,
        rope_scaling=rope.scaling,
        layer_windows=_layer_windows(text, defaults),
        attention_scale=latent_scale(latent, rope.scaling) if latent else _attention_scale(text, head_dim, gemma=gemma),
        attention_soft_cap=text.optional_number("attn_logit_softcapping") if gemma else None,
        final_soft_cap=text.optional_number("final_logit_softcapping") if gemma else None,
        attention_bias=bias or defaults.query_bias,
        attention_output_bias=bias,
        mlp_bias=text.flag("mlp_bias", False) and model_type in ("llama", "deepseek_v2"),
        activation=_activation(text, defaults),
        embedding_scale=math.sqrt(hidden_size) if gemma else None,
        tie_word_embeddings=_tied(fields, text, defaults),
        dtype=_dtype(fields, text),
        bos_token_id=next(iter(text.token_ids("bos_token_id") or fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, text, generation),
        num_draft_layers=text.count("num_nextn_predict_layers", 0) if model_type == "deepseek_v3" else 0,
        experts=experts_config(text, model_type),
        latent=latent,
    )


def _attention_scale(text: Fields, head_dim: int, *, gemma: bool) -> float:
    return float((text.number("query_pre_attn_scalar", 256.0) if gemma else head_dim) ** -0.5)


def _heads(text: Fields, defaults: Defaults, num_heads: int) -> tuple[int, int]:
    """KV heads, and the size of a head."""
    num_kv_heads = text.size("num_key_value_heads", defaults.num_kv_heads or num_heads)
    if num_heads % num_kv_heads != 0:
        raise text.wrong("num_key_value_heads", num_kv_heads, f"a divisor of the {num_heads} attention heads")
    return num_kv_heads, text.size("head_dim", defaults.head_dim or text.size("hidden_size") // num_heads)


def _architecture(fields: Fields) -> tuple[str, Fields]:
    """The architecture to build, and the object that describes its text part (`text_config` of a multimodal model)."""
    names = fields.texts("architectures") or []
    model_type = fields.text("model_type") or ""
    if not names and model_type in MODEL_TYPES:
        names = [MODEL_TYPES[model_type].architecture]
    if not names:
        raise fields.wrong("architectures", None, f"one of {', '.join(MODELS.names())}")
    MODELS.check(names[0])
    text = fields.nested("text_config")
    return names[0], fields if text is None else text


def _check_quantization(fields: Fields, text: Fields) -> None:
    quantization = fields.nested("quantization_config") or text.nested("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method") or quantization.text("quant_algo") or "unknown"
        raise ConfigError(
            f"{fields.where}: weights quantised by {method!r} are not supported; use the model's bfloat16 or "
            "float16 folder, or a GGUF file of it."
        )


def _max_positions(text: Fields, scaling: RopeScaling | None, defaults: Defaults) -> int:
    """YaRN configs may keep the original length in max_position_embeddings; the scaled one is what the model can do."""
    stated = text.size("max_position_embeddings", defaults.max_positions)
    if scaling is None or scaling.kind != "yarn":
        return stated
    return max(stated, int(scaling.original_max_position_embeddings * scaling.factor))


def _activation(text: Fields, defaults: Defaults) -> Activation:
    key = "hidden_act" if defaults.activation == "silu" else "hidden_activation"
    name = text.text(key, defaults.activation) or ""
    if name not in ACTIVATIONS:
        raise text.wrong(key, name, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _tied(fields: Fields, text: Fields, defaults: Defaults) -> bool:
    source = text if text.has("tie_word_embeddings") else fields
    return source.flag("tie_word_embeddings", defaults.tied)


def _dtype(fields: Fields, text: Fields) -> Literal["bfloat16", "float16", "float32"]:
    names = (source.text(key) for source in (text, fields) for key in ("dtype", "torch_dtype"))
    name = next((found for found in names if found is not None), "bfloat16")
    if name not in DTYPES:
        raise fields.wrong("torch_dtype", name, f"one of {', '.join(DTYPES)}")
    return cast(Literal["bfloat16", "float16", "float32"], name)


def _eos_token_ids(fields: Fields, text: Fields, generation: Fields) -> tuple[int, ...]:
    sources = (fields, text, generation)
    return tuple(dict.fromkeys(token_id for source in sources for token_id in source.token_ids("eos_token_id")))


def _layer_windows(text: Fields, defaults: Defaults) -> tuple[int | None, ...]:
    """Each layer's window: from layer_types if they are listed, else by the model type's own rule."""
    num_layers = text.size("num_hidden_layers")
    is_off = defaults.windows in ("late", "switched") and not text.flag("use_sliding_window", False)
    if defaults.windows == "none" or is_off:
        return (None,) * num_layers
    if text.flag("use_bidirectional_attention", False):
        raise text.wrong("use_bidirectional_attention", True, "false (text is generated left to right)")
    window = text.optional_size("sliding_window", defaults.sliding_window)
    kinds = text.texts("layer_types")
    if kinds is None:
        windowed = [_is_windowed(text, defaults, layer) for layer in range(num_layers)]
    elif len(kinds) != num_layers or not {"sliding_attention", "full_attention"}.issuperset(kinds):
        raise text.wrong("layer_types", kinds, f"sliding_attention or full_attention for each of {num_layers} layers")
    else:
        windowed = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if flag else None for flag in windowed)


def _is_windowed(text: Fields, defaults: Defaults, layer: int) -> bool:
    if defaults.windows == "late":
        return layer >= text.size("max_window_layers", 28)
    if defaults.windows == "pattern":
        return (layer + 1) % text.size("sliding_window_pattern", GEMMA3_PATTERN) != 0
    return True


class _Rope:
    """Rotary bases and scaling, from `rope_parameters` (one object, or one a kind of layer) or the older keys."""

    def __init__(self, text: Fields, *, gemma: bool) -> None:
        _check_rotates_whole_heads(text)
        self.local_theta: float | None = None
        parameters = text.nested("rope_parameters")
        default_theta = GEMMA3_THETA if gemma else 10000.0
        full = None if parameters is None else parameters.nested("full_attention") or parameters
        if full is not None and full.has("rope_theta"):
            self.theta = full.number("rope_theta")
        else:
            self.theta = text.number("rope_theta", default_theta)
        if gemma:
            local = None if parameters is None else parameters.nested("sliding_attention")
            default_local = text.number("rope_local_base_freq", GEMMA3_LOCAL_THETA)
            self.local_theta = default_local if local is None else local.number("rope_theta", default_local)
            if local is not None and _rope_scaling(text, local) is not None:
                raise local.wrong("rope_type", local.text("rope_type"), "default (windowed layers are not scaled)")
        scaling = text.nested("rope_scaling") if full is None else full
        self.scaling = None if scaling is None else _rope_scaling(text, scaling)


def _check_rotates_whole_heads(fields: Fields) -> None:
    fraction = fields.number("partial_rotary_factor", 1.0)
    if fraction != 1.0:
        raise fields.wrong("partial_rotary_factor", fraction, "1 (heads that rotate whole)")


def _rope_scaling(text: Fields, scaling: Fields) -> RopeScaling | None:
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    _check_rotates_whole_heads(scaling)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=scaling.number("factor"))
    original = scaling.size(
        "original_max_position_embeddings",
        text.optional_size("original_max_position_embeddings") or text.size("max_position_embeddings"),
    )
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position_embeddings=original,
        )
    if kind == "yarn":
        max_positions = text.size("max_position_embeddings", original)
        return _yarn_scaling(scaling, original, max_positions, is_latent=text.text("model_type") in LATENT)
    raise scaling.wrong("rope_type", kind, "one of default, linear, llama3, yarn")


def _yarn_scaling(scaling: Fields, original: int, max_positions: int, *, is_latent: bool) -> RopeScaling:
    for key in ("mscale", "mscale_all_dim"):
        if scaling.has(key) and not is_latent:
            raise scaling.wrong(key, scaling.content[key], "no such key (attention_factor is supported)")
    factor = scaling.number("factor", max_positions / original)
    magnitude, all_dims = (scaling.optional_number(key) for key in ("mscale", "mscale_all_dim"))
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None and magnitude is not None and all_dims is not None:
        attention_factor = yarn_magnitude(factor, magnitude) / yarn_magnitude(factor, all_dims)
    if not scaling.flag("truncate", True):
        raise scaling.wrong("truncate", False, "true")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        magnitude_all_dims=all_dims,
    )
