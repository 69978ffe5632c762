"""Mixtures of experts and latent attention: what published configurations mean, and which tensors they imply."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from diptych.config import ModelConfig
from diptych.errors import ConfigError
from diptych.models.config import TransformerConfig
from diptych.models.dummy import DummySource
from diptych.models.huggingface import config_from_fields, config_from_folder
from diptych.models.json_fields import Fields
from diptych.models.loader import load_model
from diptych.models.shapes import tensor_shapes
from diptych.models.spec import inspect_model

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2-moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=40),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, mlp_only_layers=[1], attention_bias=True),
    "deepseek-v2": DeepseekV2Config(**DEEPSEEK, q_lora_rank=None, attention_bias=True, mlp_bias=True),
    "deepseek-v3": DeepseekV3Config(**DEEPSEEK, q_lora_rank=24, n_group=2, topk_group=1),
}

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def parse(content: dict[str, Any]) -> TransformerConfig:
    return config_from_fields(Fields(content, "config.json"), Fields({}, "generation_config.json"))


@pytest.fixture(params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny random model of each kind, as transformers saves it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(tmp_path)
    return tmp_path


def test_shapes_are_those_of_the_checkpoint(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    assert tensor_shapes(config_from_folder(folder)) == {name: tuple(x.shape) for name, x in stored.items()}


def test_loads_from_files_and_from_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[str, int, int]] = []
    for load_format in ("auto", "dummy"):
        spec = inspect_model(ModelConfig(model_path=str(folder), load_format=load_format))
        load_model(spec, dtype=torch.bfloat16, device="cpu", progress=lambda *call: calls.append(call))
        total = len(tensor_shapes(spec.config))
        assert calls[-1] == ("weights", total, total)
    assert not caplog.records
    assert set(DummySource(spec.config).names()) == set(load_file(folder / "model.safetensors"))


def test_layers_for_further_tokens_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["deepseek-v3"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    further = {"model.layers.3.eh_proj.weight": torch.ones(64, 128), "model.layers.3.enorm.weight": torch.ones(64)}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    spec = inspect_model(ModelConfig(model_path=str(tmp_path)))
    with caplog.at_level(logging.WARNING):
        load_model(spec, dtype=torch.float32, device="cpu")
    assert not caplog.records
    save_file(load_file(file) | {"model.layers.4.enorm.weight": torch.ones(64)}, file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load_model(spec, dtype=torch.float32, device="cpu")
    assert "model.layers.4.enorm.weight" in caplog.text


def test_attention_scale_is_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert config_from_folder(folder).attention_scale == pytest.approx(model.model.layers[0].self_attn.scaling)


def test_deepseek_v3() -> None:
    config = parse(DEEPSEEK_V3)
    assert config.latent is not None and config.experts is not None and config.rope_scaling is not None
    assert (config.num_kv_heads, config.kv_head_dim, config.head_dim) == (1, 576, 64)
    assert config.experts.layers == (False,) * 3 + (True,) * 58
    assert (config.experts.shared_size, config.num_draft_layers) == (2048, 1)
    magnitude = 0.1 * 3.6888794541139363 + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * magnitude**2)
    assert config.rope_scaling.attention_factor == pytest.approx(1.0)
    assert config.max_position_embeddings == 163840
    total = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    assert total == pytest.approx(671e9, rel=0.001)


def test_qwen3_30b() -> None:
    config = parse(QWEN3_30B_A3B)
    assert config.experts is not None and config.latent is None
    assert all(config.experts.layers) and config.experts.shared_size == 0
    assert config.layer_windows == (None,) * 48
    total = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    assert total == pytest.approx(30.5e9, rel=0.002)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"scoring_func": "softmax"}, "scoring_func.*'softmax'"),
        ({"topk_method": "greedy"}, "topk_method.*'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"n_group": 7}, "n_group"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
        ({"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy"}, "norm_topk_prob"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(DEEPSEEK_V3 | change)
