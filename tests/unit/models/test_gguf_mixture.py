"""Qwen3-MoE from GGUF, where the experts of a layer are one tensor: expanded, and computed on the file's own blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from diptych.config import ModelConfig
from diptych.kernels.gguf_linear import GGUFLinear
from diptych.kernels.library import kernels
from diptych.kernels.linear import Quantization
from diptych.layers.moe import Choice, MoE
from diptych.models.loader import load_model
from diptych.models.spec import ModelSpec, inspect_model
from diptych.models.transformer import Transformer

NUM_LAYERS, NUM_EXPERTS = 3, 4
CONFIG = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=NUM_EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as transformers saves it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(CONFIG).save_pretrained(folder)
    return folder


def write(folder: Path, kind: str) -> Path:
    """The same as a converter writes it: three-dimensional tensors of experts, a router in float32."""
    weights = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, NUM_LAYERS)
    path = folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)
    writer.add_eos_token_id(2)
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(96)])
    stacked: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        stem, _, suffix = name.rpartition(".")
        if ".experts." not in name:
            stacked[f"{names.get_name(stem)}.{suffix}"] = weight.numpy()
        elif ".experts.0." in name:
            each = [weights[name.replace(".experts.0.", f".experts.{i}.")].numpy() for i in range(NUM_EXPERTS)]
            stacked[f"{names.get_name(stem.replace('.experts.0.', '.experts.'))}.weight"] = np.stack(each)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, values in stacked.items():
        if values.ndim > 1 and kind != "F32" and "ffn_gate_inp" not in name:
            writer.add_tensor(name, quants.quantize(values, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spec_of(path: Path) -> ModelSpec:
    return inspect_model(ModelConfig(model_path=str(path)))


def load(path: Path, dtype: torch.dtype, quantization: Quantization = "none") -> Transformer:
    return load_model(spec_of(path), dtype=dtype, device="cpu", quantization=quantization)


def test_equals_the_folder(folder: Path) -> None:
    path = write(folder, "F32")
    ours, theirs = spec_of(path).config, spec_of(folder).config
    assert ours.experts == theirs.experts
    expected = dict(load(folder, torch.float32).named_parameters())
    for name, parameter in load(path, torch.float32).named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_experts_are_computed_on_their_blocks(folder: Path, kind: str) -> None:
    path = write(folder, kind)
    kept, expanded = load(path, torch.bfloat16, "gguf"), load(path, torch.bfloat16)
    x = torch.randn(9, 64).bfloat16()
    choice = Choice(torch.randint(0, NUM_EXPERTS, (9, 2)), torch.rand(9, 2))
    for ours, theirs in zip(kept.layers, expanded.layers, strict=True):
        if isinstance(ours.mlp, MoE):
            assert all(isinstance(kernel, GGUFLinear) for pair in ours.mlp.experts.packed for kernel in pair)
            found, wanted = ours.mlp.experts(x, choice), theirs.mlp.experts(x, choice)
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())
    assert sum(isinstance(layer.mlp, MoE) for layer in kept.layers) == 3
