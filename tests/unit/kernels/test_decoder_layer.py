"""A layer as one kernel against the same layer part by part: the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from diptych.attention.backend import AttentionInputs, ForwardInputs
from diptych.attention.cpu import CPUAttention
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.config import TransformerConfig
from diptych.models.dummy import DummySource
from diptych.models.registry import MODELS
from diptych.models.transformer import DecoderLayer, Transformer


def tiny_model(architecture: str) -> Transformer:
    config = TransformerConfig(
        architecture=architecture,
        model_type="tiny",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        layer_windows=(None, 9, None),
        attention_scale=32**-0.5,
        activation="gelu_tanh" if architecture.startswith("Gemma") else "silu",
        attention_bias=architecture.startswith("Qwen2"),
    )
    model = MODELS.resolve(architecture)(config, dtype=torch.bfloat16, device="cpu")
    assert isinstance(model, Transformer)
    model.load(DummySource(config, seed=0, dtype=torch.bfloat16))
    model.pack()
    return model


def hidden_states(model: Transformer) -> torch.Tensor:
    """Two sequences in one step of 40 and 1 tokens."""
    config = model.config
    layout = KVLayout.single_rank(
        config.num_layers, config.num_kv_heads, head_dim=config.head_dim, page_size=16, dtype="bfloat16"
    )
    pool = KVPool(layout, 8, torch.device("cpu"), torch.bfloat16)
    lens = [40, 1]
    inputs = ForwardInputs(
        token_ids=torch.arange(41) * 3 % 128,
        positions=torch.tensor([*range(40), 0]),
        logit_rows=torch.arange(41),
        attention=AttentionInputs(
            query_starts=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
            kv_lens=torch.tensor(lens, dtype=torch.int32),
            page_table=torch.tensor([[4, 0, 2], [7, 0, 0]], dtype=torch.int32),
            kv_slots=torch.tensor([*range(64, 80), *range(16), *range(32, 40), 7 * 16]),
            query_lens_host=lens,
            kv_lens_host=lens,
        ),
    )
    with torch.inference_mode():
        return model.forward(inputs, CPUAttention(pool))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_fused_layer_is_its_parts(instruction_set: str, architecture: str) -> None:
    model = tiny_model(architecture)
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    assert all(layer.fused is not None for layer in layers)
    fused = hidden_states(model)
    for layer in layers:
        layer.fused = None
    assert fused.isfinite().all()
    assert torch.equal(hidden_states(model), fused)
