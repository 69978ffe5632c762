"""Real servers: `diptych serve` as its own process, with the demo model or with a tiny one made here.

A server takes a free port by itself and prints it. Each is ended by its fixture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from live_server import LiveServer, run_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

GOLDEN = Path(__file__).parents[1] / "parity" / "golden.json"


@pytest.fixture(scope="session")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The demo model in float32, for the whole session."""
    folder = tmp_path_factory.mktemp("server")
    flags = ("--dtype", "float32", "--kv-cache-memory", "384MiB", "--max-model-len", "1024")
    with run_server(folder, str(demo_model), *flags, name="demo") as live:
        yield live
        live.wait_until_idle()  # whatever the tests did, nothing is left over


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The openai SDK, pointed at the server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        yield client


@pytest.fixture(scope="session")
def golden() -> dict[str, dict[str, list[int]]]:
    """Name -> prompt and greedy output, as transformers has it; made by tests/parity/make_golden.py."""
    return {case["name"]: case for case in json.loads(GOLDEN.read_text())["cases"]}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama whose tokens are bytes: it says nothing of sense, but fast."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=256,
        bos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


@pytest.fixture
def start_tiny(tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """`with start_tiny(*flags) as live:` serves the tiny model, for tests that end their server."""

    def start(*flags: str) -> Any:
        flags = ("--kv-cache-memory", "16MiB", "--num-threads", "1", "--dtype", "float32", *flags)
        return run_server(tmp_path, str(tiny_model), *flags, name="tiny")

    return start


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The tiny model for the whole session, with a short context so that whatever is asked of it ends."""
    folder = tmp_path_factory.mktemp("tiny-server")
    flags = ("--kv-cache-memory", "16MiB", "--num-threads", "1", "--dtype", "float32", "--max-model-len", "256")
    with run_server(folder, str(tiny_model), *flags, name="tiny") as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No test may leave a process of ours running."""
    yield
    children = psutil.Process(os.getpid()).children(recursive=True)
    assert not [child for child in children if child.is_running() and "diptych" in " ".join(child.cmdline())]
