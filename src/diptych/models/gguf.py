"""What a GGUF file says about a model: its TransformerConfig, and which of its tensors is which.

Owns the GGUF side of naming and of conventions (rotary scaling stored as a tensor, norms stored as 1 + w). Reading and
dequantising tensors is `diptych.models.gguf_source`. Never imports torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map

from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile
from diptych.layers.routing import Routing
from diptych.models.config import ExpertsConfig, RopeScaling, TransformerConfig
from diptych.models.json_fields import MAX_SIZE
from diptych.models.registry import MODELS
from diptych.models.shapes import MAX_LAYERS, tensor_shapes

ROPE_FACTORS = "rope_freqs.weight"
GEMMA3_LOCAL_THETA = 10000.0
GEMMA3_PATTERN = 6
GEMMA3_27B_LAYERS = 62

_KINDS = GGMLQuantizationType
DEQUANTISABLE = frozenset(
    {_KINDS.F32, _KINDS.F16, _KINDS.BF16, _KINDS.Q4_0, _KINDS.Q4_1, _KINDS.Q5_0, _KINDS.Q5_1, _KINDS.Q8_0}
    | {_KINDS.Q2_K, _KINDS.Q3_K, _KINDS.Q4_K, _KINDS.Q5_K, _KINDS.Q6_K, _KINDS.IQ4_NL, _KINDS.IQ4_XS, _KINDS.MXFP4}
    | {_KINDS.IQ1_S, _KINDS.IQ1_M, _KINDS.IQ2_XXS, _KINDS.IQ2_XS, _KINDS.IQ2_S, _KINDS.IQ3_XXS, _KINDS.IQ3_S}
    | {_KINDS.TQ1_0, _KINDS.TQ2_0}
)


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Family:
    """How one GGUF architecture maps to ours.

    permutes_query_key: rows of q and k are stored for interleaved rotary pairs. norm_offset: what the file added to
    norm weights.
    """

    architecture: str
    model_type: str
    naming: MODEL_ARCH
    permutes_query_key: bool = False
    norm_offset: float = 0.0


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", MODEL_ARCH.LLAMA, permutes_query_key=True),
    "mistral": Family("MistralForCausalLM", "mistral", MODEL_ARCH.LLAMA, permutes_query_key=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", MODEL_ARCH.QWEN2),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", MODEL_ARCH.QWEN3),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", MODEL_ARCH.QWEN3MOE),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", MODEL_ARCH.GEMMA3, norm_offset=1.0),
}


def family_of(file: GGUFFile) -> Family:
    """The family of the file's `general.architecture`. Raises ConfigError listing those supported."""
    name = file.text("general.architecture")
    if name not in FAMILIES:
        raise ConfigError(
            f"{file.path} holds a model of architecture {name!r}, which is not supported; GGUF models of these are: "
            f"{', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[name]


def expert_of(name: str) -> int | None:
    """The expert that a tensor of a Hugging Face checkpoint belongs to, if it belongs to one."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


class TensorNames:
    """Hugging Face names to GGUF names for one file and back, by the gguf library's own table."""

    def __init__(self, file: GGUFFile, config: TransformerConfig) -> None:
        self._map = get_tensor_name_map(family_of(file).naming, config.num_layers)
        self._huggingface = {self.to_gguf(name): name for name in tensor_shapes(config)}

    def to_gguf(self, name: str) -> str | None:
        """model.layers.0.mlp.up_proj.weight gives blk.0.ffn_up.weight; None if the architecture has no such tensor.

        All experts of a layer are one tensor.
        """
        stem, _, suffix = _EXPERT.sub(".experts.", name).rpartition(".")
        base = self._map.get_name(stem)
        return None if base is None else f"{base}.{suffix}"

    def to_huggingface(self, name: str) -> str:
        """The other way, for tensors that the configuration implies; others keep their GGUF name."""
        return self._huggingface.get(name, name)


def config_from_gguf(file: GGUFFile) -> TransformerConfig:
    """The model's configuration, from metadata and the tensor directory.

    Raises ConfigError for an unsupported architecture, tensor type or rotary scaling, and for missing metadata.
    """
    family = family_of(file)
    MODELS.check(family.architecture)
    _check_tensor_types(file)
    metadata = _Metadata(file)
    num_layers = metadata.size("block_count", most=MAX_LAYERS)
    num_heads = metadata.per_layer_size("attention.head_count")
    hidden_size = metadata.size("embedding_length")
    head_dim = _head_dim(metadata, hidden_size // num_heads)
    gemma = family.model_type == "gemma3_text"
    context_length = metadata.size("context_length")
    scaling = _rope_scaling(file, metadata, head_dim=head_dim, context_length=context_length)
    return TransformerConfig(
        architecture=family.architecture,
        model_type=family.model_type,
        vocab_size=_embedding_rows(file, hidden_size),
        hidden_size=hidden_size,
        intermediate_size=metadata.per_layer_size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.per_layer_size("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        max_position_embeddings=context_length,
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.number("rope.freq_base", default=1000000.0 if gemma else 10000.0),
        rope_local_theta=metadata.number("rope.freq_base_swa", default=GEMMA3_LOCAL_THETA) if gemma else None,
        rope_scaling=scaling,
        layer_windows=_layer_windows(file, metadata, num_layers, gemma=gemma),
        attention_scale=_attention_scale(metadata, hidden_size, num_heads, head_dim, gemma=gemma),
        attention_soft_cap=metadata.optional_number("attn_logit_softcapping"),
        final_soft_cap=metadata.optional_number("final_logit_softcapping"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=math.sqrt(hidden_size) if gemma else None,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype="bfloat16",
        bos_token_id=file.integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
        experts=_experts(file, metadata, num_layers, family),
    )


class _Metadata:
    """Metadata of the file's architecture, checked: keys are given without the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._prefix = file.text("general.architecture")

    def size(self, key: str, *, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An integer from 1 to `most`. Raises ConfigError if it is missing without a default, or not one."""
        value = self._file.integer(f"{self._prefix}.{key}")
        value = default if value is None else value
        if value is None or not 1 <= value <= most:
            raise self._wrong(key, value)
        return value

    def per_layer_size(self, key: str, *, default: int | None = None) -> int:
        """A size that may be given as a list of one value a layer, all the same."""
        if not self._file.is_array(f"{self._prefix}.{key}"):
            return self.size(key, default=default)
        values = set(self._file.numbers(f"{self._prefix}.{key}").tolist())
        if len(values) != 1 or not 1 <= min(values) <= MAX_SIZE:
            raise ConfigError(
                f"{self._file.path}: {self._prefix}.{key} differs between layers ({sorted(values)}), which is not "
                "supported; use a model whose layers are alike."
            )
        return int(values.pop())

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None if the key is missing."""
        value = self._file.number(f"{self._prefix}.{key}")
        if value is not None and not math.isfinite(value):
            raise self._wrong(key, value)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number. Raises ConfigError if it is missing and there is no default."""
        value = self.optional_number(key)
        value = default if value is None else value
        if value is None:
            raise self._wrong(key, value)
        return value

    def text(self, key: str) -> str | None:
        """A string, or None."""
        return self._file.text(f"{self._prefix}.{key}")

    def flags(self, key: str) -> list[bool] | None:
        """A list of booleans, or None."""
        name = f"{self._prefix}.{key}"
        return self._file.numbers(name).astype(bool).tolist() if self._file.is_array(name) else None

    def _wrong(self, key: str, value: object) -> ConfigError:
        return ConfigError(
            f"{self._file.path}: metadata {self._prefix}.{key} is {'missing' if value is None else value}; "
            "convert the model to GGUF again, or name another file."
        )


def _experts(file: GGUFFile, metadata: _Metadata, num_layers: int, family: Family) -> ExpertsConfig | None:
    """Qwen3-MoE's mixture, whose weights always add up to one. Files of the dense families may hold one too."""
    count = file.integer(f"{file.text('general.architecture')}.expert_count")
    if family.model_type == "qwen3_moe":
        routing = Routing(
            num_experts=metadata.size("expert_count"),
            num_chosen=metadata.size("expert_used_count"),
            renormalizes=True,
            rounds_weights=True,
        )
        return ExpertsConfig(
            routing=routing,
            intermediate_size=metadata.size("expert_feed_forward_length"),
            layers=tuple(f"blk.{layer}.ffn_gate_exps.weight" in file.tensors for layer in range(num_layers)),
        )
    if count:
        raise ConfigError(
            f"{file.path} holds a mixture of {count} experts, which is supported of Qwen3-MoE alone from GGUF; use the "
            "model's Hugging Face folder."
        )
    return None


def _check_tensor_types(file: GGUFFile) -> None:
    for tensor in file.tensors.values():
        if tensor.kind not in DEQUANTISABLE:
            raise ConfigError(
                f"{file.path}: tensor {tensor.name} is of type {tensor.kind.name}, which is not supported; use "
                f"a file of one of these: {', '.join(sorted(kind.name for kind in DEQUANTISABLE))}."
            )


def _head_dim(metadata: _Metadata, fallback: int) -> int:
    head_dim = metadata.size("attention.key_length", default=fallback)
    value_len = metadata.size("attention.value_length", default=head_dim)
    rotary_len = metadata.size("rope.dimension_count", default=head_dim)
    if value_len != head_dim or rotary_len != head_dim:
        raise ConfigError(
            f"key, value and rotary lengths differ ({head_dim}, {value_len}, {rotary_len}), which is not supported; "
            "use a model whose heads rotate whole."
        )
    return head_dim


def _embedding_rows(file: GGUFFile, hidden_size: int) -> int:
    """Vocabulary size: the embedding's rows, which may be more than the tokenizer has tokens."""
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] != hidden_size:
        shape = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise ConfigError(f"{file.path}: tensor token_embd.weight is {shape}, expected [vocabulary, {hidden_size}].")
    return tensor.shape[0]


def _layer_windows(file: GGUFFile, metadata: _Metadata, num_layers: int, *, gemma: bool) -> tuple[int | None, ...]:
    """Gemma 3: five windowed layers, then a full one, unless the file lists them. Others: all windowed if any is."""
    prefix = file.text("general.architecture")
    window = file.integer(f"{prefix}.attention.sliding_window")
    if not window:
        return (None,) * num_layers
    windowed = metadata.flags("attention.sliding_window_pattern")
    if windowed is None:
        period = metadata.size("attention.sliding_window_pattern", default=GEMMA3_PATTERN) if gemma else num_layers + 1
        windowed = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(windowed) < num_layers:
        raise ConfigError(f"{file.path}: the sliding window pattern names {len(windowed)} of {num_layers} layers.")
    return tuple(window if flag else None for flag in windowed[:num_layers])


def _attention_scale(metadata: _Metadata, hidden_size: int, num_heads: int, head_dim: int, *, gemma: bool) -> float:
    """1/sqrt(head_dim); Gemma 3 27B, which only its depth tells apart, takes hidden_size / num_heads instead."""
    explicit = metadata.optional_number("attention.scale")
    if explicit:
        return explicit
    is_27b = gemma and metadata.size("block_count") == GEMMA3_27B_LAYERS
    return float((hidden_size / num_heads if is_27b else head_dim) ** -0.5)


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """End of sequence, of turn and of message: whatever the file names as an end."""
    ids = (file.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _rope_scaling(file: GGUFFile, metadata: _Metadata, *, head_dim: int, context_length: int) -> RopeScaling | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim=head_dim, theta=metadata.number("rope.freq_base", default=10000.0))
    kind = metadata.text("rope.scaling.type") or "none"
    factor = metadata.number("rope.scaling.factor", default=1.0)
    original = metadata.size("rope.scaling.original_context_length", default=context_length)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor, original_max_position_embeddings=original)
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=metadata.number("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=metadata.number("rope.scaling.yarn_beta_slow", default=1.0),
        )
    raise ConfigError(f"{file.path}: rotary scaling {kind!r} is not supported; linear, yarn and llama3 are.")


def _llama3_scaling(file: GGUFFile, *, head_dim: int, theta: float) -> RopeScaling | None:
    """Llama 3.x files carry each frequency's divisor as a tensor; recover the rule's factor, and check that it fits."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind != GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} is {tensor.kind.name} of shape {tensor.shape}.")
    stored = file.rows(tensor).reshape(-1).view(np.float32)
    factor = float(stored.max())
    if factor == 1.0:
        return None
    scaling = RopeScaling(kind="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    if not np.allclose(stored, llama3_divisors(scaling, head_dim=head_dim, theta=theta), rtol=1e-3):
        raise ConfigError(
            f"{file.path}: {ROPE_FACTORS} does not follow Llama 3's rule (factor {factor:g}, original context "
            f"{scaling.original_max_position_embeddings}); load the model from its Hugging Face folder instead."
        )
    return scaling


def llama3_divisors(scaling: RopeScaling, *, head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """What Llama 3's rotary scaling divides each of the `head_dim / 2` frequencies by, from fast to slow."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position_embeddings / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - kept) / scaling.factor + kept)
