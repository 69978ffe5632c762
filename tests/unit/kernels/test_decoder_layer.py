"""A layer as one kernel against the same layer part by part: the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from diptych.attention.backend import AttentionInputs, ForwardInputs
from diptych.attention.cpu import CPUAttention
from diptych.attention.reference import ReferenceAttention
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.config import TransformerConfig
from diptych.models.dummy import DummySource
from diptych.models.registry import MODELS
from diptych.models.transformer import DecoderLayer, Transformer


def tiny_model(architecture: str, *, layer_windows: tuple[int | None, ...] = (None, 9, None)) -> Transformer:
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
        layer_windows=layer_windows,
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


# Tokens of this step and before it: a prompt longer than a piece of attention, chunks, a split context, decodes.
RAGGED = [(150, 0), (70, 40), (1, 600), (1, 0), (5, 530), (1, 20)]


def ragged_inputs(wanted_rows: list[int]) -> ForwardInputs:
    """Of RAGGED, row b on pages 40 b and those after it; the last tokens of `wanted_rows` are wanted."""
    counts = [count for count, _ in RAGGED]
    ends = [count + before for count, before in RAGGED]
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    positions = torch.cat([torch.arange(before, before + count) for count, before in RAGGED])
    row_of_token = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ForwardInputs(
        token_ids=positions * 7 % 128,
        positions=positions,
        logit_rows=starts[1:][wanted_rows] - 1,
        attention=AttentionInputs(
            query_starts=starts.int(),
            kv_lens=torch.tensor(ends, dtype=torch.int32),
            page_table=(40 * torch.arange(len(counts))[:, None] + torch.arange(40)).int(),
            kv_slots=row_of_token * 640 + positions,
            query_lens_host=counts,
            kv_lens_host=ends,
        ),
    )


@pytest.mark.parametrize("wanted_rows", [[], [0], [1, 2, 4], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("window", [None, 9])
def test_last_layer_of_wanted_tokens_alone(instruction_set: str, wanted_rows: list[int], window: int | None) -> None:
    model = tiny_model("Gemma3ForCausalLM", layer_windows=(9, None, window))
    layout = KVLayout.single_rank(3, 2, head_dim=32, page_size=16, dtype="bfloat16")
    inputs = ragged_inputs(wanted_rows)
    generator = torch.Generator().manual_seed(0)
    full, trimmed = (KVPool(layout, 240, torch.device("cpu"), torch.bfloat16) for _ in range(2))
    full.tensor.copy_(torch.randint(-9, 9, full.tensor.shape, generator=generator))
    trimmed.tensor.copy_(full.tensor)
    with torch.inference_mode():
        expected = model(inputs, CPUAttention(full))[inputs.logit_rows]
        found = model.forward_logit_rows(inputs, CPUAttention(trimmed))
    assert torch.equal(found, expected) and found.isfinite().all()
    assert torch.equal(trimmed.tensor, full.tensor), "K and V of every token must be written"


def test_other_attention_computes_all_and_picks() -> None:
    model = tiny_model("LlamaForCausalLM")
    layout = KVLayout.single_rank(3, 2, head_dim=32, page_size=16, dtype="bfloat16")
    inputs = ragged_inputs([1, 4])
    pools = [KVPool(layout, 240, torch.device("cpu"), torch.bfloat16) for _ in range(2)]
    for pool in pools:
        pool.tensor.zero_()
    with torch.inference_mode():
        expected = model(inputs, ReferenceAttention(pools[0]))[inputs.logit_rows]
        assert torch.equal(model.forward_logit_rows(inputs, ReferenceAttention(pools[1])), expected)
