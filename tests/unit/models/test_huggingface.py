"""config.json to TransformerConfig: transformers' own configs, and the keys of published models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from diptych.errors import ConfigError
from diptych.models.config import RopeScaling, TransformerConfig
from diptych.models.huggingface import config_from_fields, config_from_folder
from diptych.models.json_fields import Fields

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}

QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}

GEMMA3_4B_IT = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def parse(content: dict[str, Any], generation: dict[str, Any] | None = None) -> TransformerConfig:
    return config_from_fields(Fields(content, "config.json"), Fields(generation or {}, "generation_config.json"))


def test_llama_31() -> None:
    config = parse(LLAMA_31_8B)
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    assert (config.rope_theta, config.rope_local_theta, config.max_position_embeddings) == (500000.0, None, 131072)
    assert (config.head_dim, config.num_kv_heads, config.attention_scale) == (128, 8, 128**-0.5)
    assert config.layer_windows == (None,) * 32
    assert (config.bos_token_id, config.eos_token_ids) == (128000, (128001, 128008, 128009))
    assert not config.tie_word_embeddings and not config.attention_bias


def test_mistral_windows_every_layer_unless_null() -> None:
    assert parse(MISTRAL_7B_V01).layer_windows == (4096,) * 32
    assert parse(MISTRAL_7B_V01 | {"sliding_window": None}).layer_windows == (None,) * 32


def test_qwen2_biases_and_windows() -> None:
    config = parse(QWEN25_7B)
    assert config.attention_bias and not config.attention_output_bias
    assert config.layer_windows == (None,) * 28
    windowed = parse(QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 64})
    assert windowed.layer_windows == (None,) * 20 + (64,) * 8
    listed = ["sliding_attention", "full_attention"] * 14
    windowed = parse(QWEN25_7B | {"use_sliding_window": True, "sliding_window": 64, "layer_types": listed})
    assert windowed.layer_windows == (64, None) * 14


def test_gemma3_multimodal_uses_text_config_and_its_defaults() -> None:
    config = parse(GEMMA3_4B_IT, {"eos_token_id": [1, 106]})
    assert (config.architecture, config.model_type) == ("Gemma3ForConditionalGeneration", "gemma3_text")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.layer_windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.rope_scaling is not None and config.rope_scaling.kind == "linear"
    assert (config.rope_theta, config.rope_local_theta) == (1000000.0, 10000.0)
    assert (config.activation, config.tie_word_embeddings, config.eos_token_ids) == ("gelu_tanh", True, (1, 106))
    assert config.embedding_scale == pytest.approx(2560**0.5)


def test_yarn_extends_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse(QWEN25_7B | {"rope_scaling": scaling})
    assert config.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert config.max_position_embeddings == 131072


def test_new_and_old_rope_keys_agree() -> None:
    old = parse(LLAMA_31_8B)
    content: dict[str, Any] = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope_")}
    rope = {"rope_theta": 500000.0, **LLAMA_31_8B["rope_scaling"]}  # type: ignore[dict-item]
    assert parse(content | {"rope_parameters": rope}) == old
    text = {key: value for key, value in GEMMA3_4B_IT["text_config"].items() if key != "rope_scaling"}  # type: ignore[attr-defined]
    layers = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert parse(GEMMA3_4B_IT | {"text_config": text | {"rope_parameters": layers}}) == parse(GEMMA3_4B_IT)


def test_eos_ids_are_joined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert config_from_folder(tmp_path).eos_token_ids == (151645, 151643)


def test_equals_what_transformers_computes(architecture: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder(architecture)
    config, theirs = config_from_folder(folder), AutoConfig.from_pretrained(folder)
    attention = AutoModelForCausalLM.from_config(theirs).model.layers[0].self_attn
    assert config.attention_scale == pytest.approx(attention.scaling)
    assert config.head_dim == attention.head_dim
    assert config.attention_bias == (attention.q_proj.bias is not None)
    assert config.attention_output_bias == (attention.o_proj.bias is not None)
    assert config.dtype == "float32"
    if "gemma3" in architecture:
        assert config.layer_windows == (16, 16, 16)
    elif architecture == "mistral":
        assert config.layer_windows == (64, 64, 64)
    else:
        assert config.layer_windows == (None, None, None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; supported are: .*Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "t5"}, "architectures"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by 'gptq'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "default"}}, "partial_rotary_factor"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "many"}, "'hidden_size' is 'many'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "divisor of the 32"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(LLAMA_31_8B | change)


def test_partial_rotation_is_refused_without_scaling_too() -> None:
    content = {key: value for key, value in LLAMA_31_8B.items() if key != "rope_scaling"}
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        parse(content | {"partial_rotary_factor": 0.5})


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00"])
def test_damaged_files_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        config_from_folder(tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        config_from_folder(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    base=st.sampled_from([LLAMA_31_8B, MISTRAL_7B_V01, QWEN25_7B, GEMMA3_4B_IT, GEMMA3_4B_IT["text_config"]]),
    data=st.data(),
)
def test_any_value_parses_or_is_a_config_error(base: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(
        st.sampled_from([*sorted(base), "rope_parameters", "layer_types", "head_dim", "quantization_config"])
    )
    try:
        parse(base | {key: data.draw(json_values)})
    except ConfigError as error:
        assert str(error)
