"""Engines of unlike shape over real NIXL, one process a rank: greedy apart equals greedy on one rank.

Tiny random models in float32, so that equal means equal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from engines import EngineUnderTest, request
from scenes import DETECTION_S
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from diptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    TransferConfig,
)
from diptych.core.request import Request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "dtype": "float32",
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
PROMPTS = [1, 4, 17, 33, 50]
MAX_TOKENS = 8
Start = Callable[..., EngineUnderTest]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by name, with four, two or one row a token and layer."""
    torch.manual_seed(0)
    models = {
        "four heads": LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4)),
        "two heads": LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
        "latent": DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **LATENT)),
    }
    folders = {}
    for name, model in models.items():
        folders[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def said_alone() -> dict[str, list[list[int]]]:
    """By model: what one rank says, once it has been asked."""
    return {}


@pytest.fixture
def start_ranks(folders: dict[str, Path], start_real: Callable[[EngineConfig], EngineUnderTest]) -> Start:
    """Starts engines of tp x pp ranks; all are ended with the test."""

    def start(role: str, model: str, shape: tuple[int, int] = (1, 1), *, page_size: int = 4) -> EngineUnderTest:
        config = EngineConfig(
            model=ModelConfig(model_path=str(folders[model]), dtype="float32", num_threads=1, device="cpu"),
            cache=CacheConfig(page_size=page_size, kv_cache_memory="1MiB"),
            scheduler=SchedulerConfig(check_invariants=True, max_num_batched_tokens=16, max_num_seqs=8),
            parallel=ParallelConfig(tp_size=shape[0], pp_size=shape[1]),
            transfer=TransferConfig(role=role),
        )
        return start_real(config)

    return start


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 96, length).tolist()


def ask(engine: EngineUnderTest, name: str, prefill: EngineUnderTest | None, lengths: list[int]) -> list[Request]:
    """Requests with the same prompts for the same lengths, of which `prefill` computes the prompts, if there is one."""
    handoff = None if prefill is None else prefill.address
    sent = [
        request(f"{name}{length}", prompt_of(length, length), handoff, max_tokens=MAX_TOKENS, ignore_eos=True)
        for length in lengths
    ]
    for each in sent:
        engine.send(each)
    return sent


def answers(engine: EngineUnderTest, sent: list[Request]) -> list[list[int]]:
    for each in sent:
        engine.wait(each.request_id, timeout_s=60.0)
    return [engine.tokens(each.request_id) for each in sent]


@pytest.mark.parametrize(
    ("model", "prefill_shape", "decode_shape", "page_sizes"),
    [
        ("two heads", (1, 1), (2, 1), (4, 4)),
        ("two heads", (2, 1), (1, 1), (4, 8)),
        ("two heads", (2, 2), (1, 1), (4, 4)),
        ("latent", (2, 1), (1, 1), (4, 4)),
        ("four heads", (4, 1), (2, 1), (4, 4)),
        ("two heads", (4, 1), (1, 2), (8, 4)),  # heads are replicated on the one side, layers dealt out on the other
    ],
)
def test_apart_says_what_one_rank_says(
    start_ranks: Start,
    said_alone: dict[str, list[list[int]]],
    model: str,
    prefill_shape: tuple[int, int],
    decode_shape: tuple[int, int],
    page_sizes: tuple[int, int],
) -> None:
    if model not in said_alone:
        alone = start_ranks("unified", model)
        said_alone[model] = answers(alone, ask(alone, "alone", None, PROMPTS))
        alone.close()
    expected = said_alone[model]
    assert len({tuple(output) for output in expected}) == len(PROMPTS)
    prefill = start_ranks("prefill", model, prefill_shape, page_size=page_sizes[0])
    decode = start_ranks("decode", model, decode_shape, page_size=page_sizes[1])
    assert answers(decode, ask(decode, "apart", prefill, PROMPTS)) == expected
    prefill.wait_at_rest()
    decode.wait_at_rest()
    load = decode.load().transfer
    assert load.rooms_done_total == len(PROMPTS) and not load.failures_total


def ranks_of(engine: EngineUnderTest) -> list[psutil.Process]:
    found = psutil.Process(engine.process.pid).children(recursive=True)
    return [child for child in found if "diptych.engine.rank" in child.cmdline()]


def test_a_killed_rank_of_prefill_is_a_lost_peer(start_ranks: Start) -> None:
    prefill = start_ranks("prefill", "two heads", (2, 1))
    decode = start_ranks("decode", "two heads")
    expected = answers(decode, ask(decode, "alone", None, [50]))
    sent = ask(decode, "apart", prefill, [50])
    os.kill(ranks_of(prefill)[1].pid, signal.SIGKILL)
    assert answers(decode, sent) == expected
    prefill.process.wait(30)
    decode.wait_at_rest()


def test_a_killed_engine_is_gone_when_its_ranks_are(start_ranks: Start) -> None:
    prefill = start_ranks("prefill", "two heads", (2, 1))
    decode = start_ranks("decode", "two heads")
    expected = answers(decode, ask(decode, "alone", None, [50]))
    sent = ask(decode, "apart", prefill, [50])
    ranks = ranks_of(prefill)
    prefill.kill()
    assert answers(decode, sent) == expected
    decode.wait_at_rest()
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_a_killed_rank_of_decode_frees_the_prefill_engine(start_ranks: Start) -> None:
    prefill = start_ranks("prefill", "two heads")
    decode = start_ranks("decode", "two heads", (2, 1))
    ask(decode, "apart", prefill, [50, 33])
    os.kill(ranks_of(decode)[1].pid, signal.SIGKILL)
    decode.process.wait(20)
    prefill.wait_at_rest(timeout_s=2 * DETECTION_S)
    other = start_ranks("decode", "two heads")
    expected = answers(other, ask(other, "alone", None, [17]))
    assert answers(other, ask(other, "apart", prefill, [17])) == expected
