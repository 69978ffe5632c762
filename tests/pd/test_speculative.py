"""Speculation on the decode side of a pair: the output is a unified engine's, and drafts begin with the first step.

A tiny random Llama in real engines, over real NIXL. The draft model is the model itself, so that what its keys and
values are worth can be read off the acceptance: they come from prefill, as further layers of the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import EngineUnderTest, request
from transformers import LlamaConfig, LlamaForCausalLM

from diptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, TransferConfig

VOCAB = 96
Start = Callable[..., EngineUnderTest]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose outputs do not repeat."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        max_position_embeddings=512,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def start_model(folder: Path, start_real: Callable[[EngineConfig], EngineUnderTest]) -> Start:
    """Starts engines with the tiny model; all are ended with the test."""

    def start(role: str, algorithm: str) -> EngineUnderTest:
        config = EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="float32", num_threads=1),
            cache=CacheConfig(page_size=4, kv_cache_memory="1MiB"),
            scheduler=SchedulerConfig(check_invariants=True, max_num_batched_tokens=16),
            speculative=SpeculativeConfig(
                speculative_algorithm=algorithm,
                speculative_draft_model_path=str(folder) if algorithm == "STANDALONE" else None,
                speculative_num_draft_tokens=4,
                speculative_adaptive=False,
            ),
            transfer=TransferConfig(role=role, local_prefill=False),
        )
        return start_real(config)

    return start


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


@pytest.mark.parametrize("algorithms", [("none", "NGRAM"), ("STANDALONE", "STANDALONE")])
def test_apart_says_what_one_engine_says(start_model: Start, algorithms: tuple[str, str]) -> None:
    prefill, decode = start_model("prefill", algorithms[0]), start_model("decode", algorithms[1])
    unified = start_model("unified", "none")
    sent = []
    for index, length in enumerate([1, 4, 17, 33, 50]):
        prompt = prompt_of(length, index) * (3 if index == 3 else 1)
        decode.send(request(f"r{index}", prompt, prefill.address, max_tokens=21, ignore_eos=True))
        unified.send(request(f"r{index}", prompt, None, max_tokens=21, ignore_eos=True))
        sent.append(f"r{index}")
    for name in sent:
        decode.wait(name)
        unified.wait(name)
        assert decode.tokens(name) == unified.tokens(name)
    prefill.wait_at_rest()
    decode.wait_at_rest()
    load = decode.load()
    assert load.transfer.rooms_done_total == 5 and not load.transfer.failures_total
    if algorithms[1] == "STANDALONE":  # every guess is right, from the first after the prompt
        assert load.accepted_drafts_total == load.drafts_total > 50


def test_a_pair_with_and_without_a_draft_model_is_refused(start_model: Start) -> None:
    prefill, decode = start_model("prefill", "none"), start_model("decode", "STANDALONE")
    decode.send(request("a", prompt_of(9, 0), prefill.address, max_tokens=4))
    decode.wait("a")
    failure = decode.failure("a")
    assert failure is not None
    assert "draft model is none here and" in failure.message
