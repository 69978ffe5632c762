"""Latent KV (MLA) between engines: greedy PD equals unified, and a base-format peer gets one region a layer.

A tiny random DeepSeek V3 in real engines, like and unlike, over real NIXL.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from base_peer import BasePeer, Shape
from engines import EngineUnderTest, request
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from diptych.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, TransferConfig
from diptych.core.request import HandTo

NUM_LAYERS, ROW_DIM = 3, 40
Start = Callable[..., EngineUnderTest]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose outputs do not repeat."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        initializer_range=0.2,
        max_position_embeddings=512,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("latent")
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def start_model(folder: Path, start_real: Callable[[EngineConfig], EngineUnderTest]) -> Start:
    """Starts engines with the tiny model; all are ended with the test."""

    def start(role: str, page_size: int = 4, **parallel: int) -> EngineUnderTest:
        config = EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="float32", num_threads=1),
            cache=CacheConfig(page_size=page_size, kv_cache_memory="1MiB"),
            scheduler=SchedulerConfig(check_invariants=True, max_num_batched_tokens=16),
            transfer=TransferConfig(role=role),
            parallel=ParallelConfig(**parallel),
        )
        return start_real(config)

    return start


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 96, length).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({}, {}),
        ({"tp_size": 2, "ep_size": 2}, {}),
        ({}, {"tp_size": 2}),
        ({"tp_size": 2, "pp_size": 2}, {"pp_size": 2, "page_size": 8}),
    ],
    ids=str,
)
def test_apart_says_what_one_engine_says(start_model: Start, src: dict[str, int], dst: dict[str, int]) -> None:
    prefill, decode = start_model("prefill", **src), start_model("decode", **dst)
    assert (decode.info.is_latent, decode.info.num_kv_heads, decode.info.head_dim) == (True, 1, ROW_DIM)
    sent = []
    for index, length in enumerate([1, 4, 17, 33, 50]):
        for name, handoff in (("apart", prefill.address), ("alone", None)):
            each = request(f"{name}{index}", prompt_of(length, index), handoff, max_tokens=12, ignore_eos=True)
            decode.send(each)
            sent.append(each)
            decode.wait(each.request_id)
    outputs = {each.request_id: decode.tokens(each.request_id) for each in sent}
    for index in range(5):
        assert outputs[f"apart{index}"] == outputs[f"alone{index}"]
    assert len({tuple(output) for output in outputs.values()}) == 5
    prefill.wait_at_rest()
    decode.wait_at_rest()
    load = decode.load().transfer
    assert load.rooms_done_total == 5 and not load.failures_total


def test_a_base_format_peer_gets_one_region_a_layer(start_model: Start) -> None:
    engine = start_model("prefill")
    peer = BasePeer(Shape(NUM_LAYERS, 24, 4, 1, ROW_DIM, itemsize=4, num_parts=1))
    pages, prompt = [5, 1, 6, 11], prompt_of(14, 1)
    peer.push(engine.address.address, peer.registration())
    peer.push(engine.address.address, peer.transfer_info(42, pages, slot=3))
    engine.send(request("base", prompt, HandTo(42), max_tokens=3, ignore_eos=True))
    peer.wait(42)
    engine.wait("base")
    rows = peer.tokens(pages, len(prompt)).view(np.float32)
    assert rows.shape == (NUM_LAYERS, 1, 14, 1, ROW_DIM)
    # A normalised latent: its mean square is one.
    latent = rows[..., :32]
    np.testing.assert_allclose((latent**2).mean(axis=-1), 1.0, rtol=1e-3)
    assert peer.ints(0, 3)[0] == engine.tokens("base")[0]
    assert peer.is_untouched_beyond(pages, [3])
    engine.wait_at_rest()
    peer.close()
