"""Tiny random models of every architecture, as transformers objects, folders and GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, rms_norm_eps=1e-5),
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=32),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=64),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=16, query_pre_attn_scalar=32),
}

GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}


@pytest.fixture(params=sorted(CONFIGS))
def architecture(request: pytest.FixtureRequest) -> str:
    """Name of each tiny model in turn."""
    return str(request.param)


@pytest.fixture
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """Makes the tiny model of a name, with weights that depend on the name only; norms and biases are not trivial."""

    def make(name: str) -> PreTrainedModel:
        torch.manual_seed(len(name))
        config = CONFIGS[name]()
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) / 8)
        return model

    return make


@pytest.fixture
def tiny_folder(tiny_model: Callable[[str], PreTrainedModel], tmp_path: Path) -> Callable[..., Path]:
    """Saves the tiny model of a name as a Hugging Face folder."""

    def save(name: str, max_shard_size: str = "1GB") -> Path:
        folder = tmp_path / name
        tiny_model(name).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


def permuted(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows as GGUF's llama stores them: halves of each head interleaved."""
    return weight.view(-1, 2, head_dim // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a converter writes for the model: GGUF names, llama's permutation, Gemma's norms plus one."""
    model_type = model.config.model_type.removesuffix("_text")
    architecture = GGUF_ARCHITECTURES[model_type]
    naming = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(naming, model.config.num_hidden_layers)
    head_dim = model.config.head_dim if "head_dim" in model.config.to_dict() else None
    head_dim = head_dim or model.config.hidden_size // model.config.num_attention_heads
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            weight = permuted(weight, head_dim)
        if architecture == "gemma3" and stem.endswith("norm"):
            weight = weight + 1
        tensors[f"{names.get_name(stem)}.{suffix}"] = weight
    return tensors


def write_metadata(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """The keys that a converter writes for our architectures."""
    values = config.to_dict()
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if values.get("head_dim"):
        writer.add_key_length(values["head_dim"])
        writer.add_value_length(values["head_dim"])
    if config.model_type in ("mistral", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(config.vocab_size)])


@pytest.fixture
def tiny_gguf(tiny_model: Callable[[str], PreTrainedModel], tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny model of a name as a GGUF file. Matrices get the quantisation named, everything else float32.

    extra: more tensors; edit: called with the writer before it writes.
    """

    def write(
        name: str,
        kind: str = "F32",
        extra: dict[str, np.ndarray] | None = None,
        edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    ) -> Path:
        model = tiny_model(name)
        path = tmp_path / f"{name}-{kind}.gguf"
        writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES[model.config.model_type.removesuffix("_text")])
        write_metadata(writer, model.config)
        edit(writer)
        quantisation = gguf.GGMLQuantizationType[kind]
        for tensor_name, weight in stored_tensors(model).items():
            values = weight.detach().numpy()
            if values.ndim == 2 and kind != "F32":
                writer.add_tensor(tensor_name, quants.quantize(values, quantisation), raw_dtype=quantisation)
            else:
                writer.add_tensor(tensor_name, np.ascontiguousarray(values))
        for tensor_name, values in (extra or {}).items():
            writer.add_tensor(tensor_name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
