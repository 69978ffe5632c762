"""The order of kernels in a step, against the model's own layers in torch, for every kind of layer.

In the interpreter the models are in float16, so that its GEMMs are torch's; on a GPU also in bfloat16, with ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from diptych.attention.backend import AttentionInputs, AttentionSpec, ForwardInputs
from diptych.attention.reference import ReferenceAttention
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.layers.routing import Routing
from diptych.models.config import ExpertsConfig, TransformerConfig
from diptych.models.cuda_transformer import CudaStep, CudaTransformer
from diptych.models.dummy import DummySource
from diptych.models.registry import MODELS
from diptych.models.transformer import Transformer

COMMON: dict[str, Any] = {
    "model_type": "",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_scale": 32**-0.5,
    "layer_windows": (None, None, None),
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
CASES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"attention_bias": True},
    "Qwen3ForCausalLM": {},
    # All experts are chosen: where rounding turned a choice around, nothing could be compared.
    "Qwen3MoeForCausalLM": {
        "experts": ExpertsConfig(
            routing=Routing(num_experts=4, num_chosen=4, rounds_weights=True),
            intermediate_size=32,
            layers=(True, False, True),
        ),
    },
    "Gemma3ForCausalLM": {
        "num_kv_heads": 1,
        "activation": "gelu_tanh",
        "layer_windows": (5, None, 5),
        "rope_local_theta": 1000.0,
        "embedding_scale": 8.0,
        "tie_word_embeddings": True,
    },
}
PAGE_SIZE = 4


@dataclass
class Attending:
    """Attention of a step whose K and V are in the pool already, by the reference: it writes what is there."""

    pool: KVPool
    inputs: AttentionInputs

    def __call__(self, query: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        pages, offsets = self.inputs.kv_slots // PAGE_SIZE, self.inputs.kv_slots % PAGE_SIZE
        key, value = (view[pages, offsets] for view in self.pool.layer(spec.layer))
        return ReferenceAttention(self.pool).forward(query, key, value, self.inputs, spec)


def model_of(architecture: str, dtype: torch.dtype, device: torch.device) -> Transformer:
    config = TransformerConfig(architecture=architecture, **(COMMON | CASES[architecture]))
    model = MODELS.resolve(architecture)(config, dtype=dtype, device=device)
    model.load(DummySource(config, seed=3, dtype=dtype, device=device))
    return model.requires_grad_(False)


def pool_of(model: Transformer, dtype: torch.dtype, device: torch.device) -> KVPool:
    config = model.config
    layout = KVLayout.single_rank(
        config.num_layers,
        config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        dtype=str(dtype).removeprefix("torch."),
    )
    return KVPool(layout, 24, device, dtype)


def inputs_of(rows: list[tuple[int, int]], device: torch.device) -> ForwardInputs:
    """rows: (tokens in this step, tokens with this step's); the pages of row b are 8 b and those after it."""
    starts = torch.tensor([0, *torch.tensor([count for count, _ in rows]).cumsum(0).tolist()])
    positions = torch.cat([torch.arange(end - count, end) for count, end in rows])
    row_of = torch.repeat_interleave(torch.arange(len(rows)), starts.diff())
    attention = AttentionInputs(
        query_starts=starts.int().to(device),
        kv_lens=torch.tensor([end for _, end in rows], dtype=torch.int32, device=device),
        page_table=(8 * torch.arange(len(rows))[:, None] + torch.arange(8)).int().to(device),
        kv_slots=(row_of * 8 * PAGE_SIZE + positions).to(device),
        query_lens_host=[count for count, _ in rows],
        kv_lens_host=[end for _, end in rows],
    )
    token_ids = (positions * 7 + row_of * 31) % 96
    return ForwardInputs(
        token_ids=token_ids.to(device),
        positions=positions.to(device),
        logit_rows=(starts[1:] - 1).to(device),
        attention=attention,
    )


@torch.inference_mode()
@pytest.mark.parametrize("architecture", sorted(CASES))
@pytest.mark.parametrize("wants_all", [False, True])
def test_a_prompt_then_a_decode_step(
    device: torch.device, dtype: torch.dtype, architecture: str, wants_all: bool
) -> None:
    model = model_of(architecture, dtype, device)
    ours, theirs = pool_of(model, dtype, device), pool_of(model, dtype, device)
    # Slots 1 and 2 sampled what the decode step's rows 0 and 2 read.
    last_tokens = torch.tensor([0, (20 * 7) % 96, (9 * 7 + 62) % 96], device=device)
    transformer = CudaTransformer(model, ours, last_tokens)
    attention = ReferenceAttention(theirs)
    for rows, hidden_ids in (([(20, 20), (1, 1), (9, 9)], {}), ([(1, 21), (1, 2), (1, 10)], {0: -2, 2: -3})):
        inputs = inputs_of(rows, device)
        token_ids = inputs.token_ids.clone()
        for place, token_id in hidden_ids.items():
            token_ids[place] = token_id
        step = CudaStep(
            token_ids=token_ids,
            positions=inputs.positions,
            kv_slots=inputs.attention.kv_slots,
            logit_rows=None if wants_all else inputs.logit_rows,
            attend=Attending(ours, inputs.attention),
        )
        hidden = transformer.forward(step)
        logits = transformer.logits(hidden[inputs.logit_rows] if wants_all else hidden).float()
        expected = model.logits(model(inputs, attention)[inputs.logit_rows])
        tolerance = 0.02 if dtype == torch.float16 else 0.15
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.tensor, theirs.tensor, rtol=tolerance, atol=tolerance)
