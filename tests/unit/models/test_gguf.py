"""GGUF metadata to TransformerConfig, against the config it was written from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile
from diptych.models.config import RopeScaling, TransformerConfig
from diptych.models.gguf import config_from_gguf
from diptych.models.huggingface import config_from_folder


def read(path: Path) -> TransformerConfig:
    return config_from_gguf(GGUFFile(path))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "mistral"])
def test_equals_the_folders_config(name: str, tiny_gguf: Callable[..., Path], tiny_folder: Callable[..., Path]) -> None:
    found, expected = read(tiny_gguf(name)), config_from_folder(tiny_folder(name))
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    changes = {"dtype": found.dtype, "rms_norm_eps": found.rms_norm_eps}
    if name == "mistral":  # the container calls it llama
        changes |= {"architecture": "LlamaForCausalLM", "model_type": "llama"}
    assert found == dataclasses.replace(expected, **changes)


def test_demo(demo_model: Path) -> None:
    config = read(demo_model)
    assert (config.architecture, config.vocab_size, config.num_layers) == ("Gemma3ForCausalLM", 262144, 18)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size) == (4, 1, 256, 640)
    assert config.layer_windows == ((512,) * 5 + (None,)) * 3
    assert (config.rope_theta, config.rope_local_theta, config.rope_scaling) == (1000000.0, 10000.0, None)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (2, (1,), True)
    assert config.embedding_scale == pytest.approx(640**0.5)
    assert config.attention_scale == 1 / 16


def test_ends_of_turn_and_message_count_as_ends(tiny_gguf: Callable[..., Path]) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 8)

    assert read(tiny_gguf("llama", edit=edit)).eos_token_ids == (2, 7, 8)


def llama3_factors(factor: float) -> np.ndarray:
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    parameters = {"rope_type": "llama3", "rope_theta": 10000.0, **scaling}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    return (plain / scaled).numpy().astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(factor: float, tiny_gguf: Callable[..., Path]) -> None:
    config = read(tiny_gguf("llama", extra={"rope_freqs.weight": llama3_factors(factor)}))
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == pytest.approx(factor, rel=1e-5)
    expected = RopeScaling(kind="llama3", factor=config.rope_scaling.factor, original_max_position_embeddings=8192)
    assert config.rope_scaling == expected


def test_trivial_rope_factors_mean_no_scaling(tiny_gguf: Callable[..., Path]) -> None:
    assert read(tiny_gguf("llama", extra={"rope_freqs.weight": np.ones(8, dtype=np.float32)})).rope_scaling is None


def test_foreign_rope_factors_are_refused(tiny_gguf: Callable[..., Path]) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    with pytest.raises(ConfigError, match="does not follow Llama 3's rule"):
        read(tiny_gguf("llama", extra={"rope_freqs.weight": factors}))


def test_mixtures_of_dense_families_are_refused(tiny_gguf: Callable[..., Path]) -> None:
    """Mixtral is called llama."""
    with pytest.raises(ConfigError, match="a mixture of 8 experts, which is supported of Qwen3-MoE alone"):
        read(tiny_gguf("llama", edit=lambda writer: writer.add_expert_count(8)))
    assert read(tiny_gguf("llama", edit=lambda writer: writer.add_expert_count(0))).experts is None


def test_linear_and_yarn_scaling(tiny_gguf: Callable[..., Path]) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_factor(4.0)

    scaling = read(tiny_gguf("gemma3", edit=linear)).rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("linear", 8.0)
    scaling = read(tiny_gguf("qwen2", edit=yarn)).rope_scaling
    assert scaling == RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=64)
    with pytest.raises(ConfigError, match="longrope"):
        read(tiny_gguf("qwen2", edit=longrope))


def test_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'mamba'.*gemma3, llama, mistral, qwen2, qwen3"):
        read(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "damaged.gguf"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_a_config_error_or_goes_unnoticed(
    data: st.DataObject, tiny_gguf: Callable[..., Path], scratch: Path, tmp_path: Path
) -> None:
    """Whatever bytes of the header are changed, nothing but ConfigError comes out."""
    original = tmp_path / "llama-F32.gguf"
    content = bytearray((original if original.exists() else tiny_gguf("llama")).read_bytes())
    header_nbytes = 3600
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, header_nbytes))] = data.draw(st.integers(0, 255))
    scratch.write_bytes(content)
    try:
        read(scratch)
    except ConfigError as error:
        assert str(error)
