"""A toy engine with a byte-level tokenizer, alone and behind HTTP: real sockets, no weights."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers
import uvicorn
import zmq
from tokenizers import decoders, models, pre_tokenizers

from diptych.config import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import EngineInfo, FromEngine, ToEngine
from diptych.engine.engine import EngineCore
from diptych.engine.toy import ToyExecutor
from diptych.metrics import ServerMetrics
from diptych.server.app import create_app
from diptych.server.client import EngineClient
from diptych.server.generation import GenerationService
from diptych.server.listening import HttpServer
from diptych.server.state import ServerState, load_text_tools

INFO = EngineInfo(
    model_path="toy",
    architecture="Toy",
    dtype="int32",
    vocab_size=258,
    max_model_len=256,
    eos_token_ids=(256,),
    page_size=4,
    num_pages=1024,
    page_nbytes=16,
    max_num_seqs=8,
    device="cpu",
    attention_backend="none",
    load_s=0.0,
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.json whose tokens are the 256 bytes, </s> (256) and <s> (257)."""
    folder = tmp_path_factory.mktemp("byte-tokenizer")
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


@pytest.fixture
async def toy_state(tokenizer_folder: Path) -> AsyncIterator[ServerState]:
    """A server's state over an EngineCore with the toy worker, on a thread."""
    config = EngineConfig(
        model=ModelConfig(model_path=str(tokenizer_folder)),
        scheduler=SchedulerConfig(check_invariants=True, max_num_batched_tokens=64),
        server=ServerConfig(served_model_name="toy", log_requests=False),
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    state = ServerState(config, ServerMetrics("vllm", "toy"))
    client = EngineClient(open_socket(context, "inproc://engine", bind=True), on_load=state.metrics.note_load)
    inner: Channel[FromEngine, ToEngine] = Channel(open_socket(context, "inproc://engine", bind=False), ToEngine)
    thread = threading.Thread(target=EngineCore(config, ToyExecutor(INFO), inner).run)
    thread.start()
    state.become_ready(client, await client.start(), load_text_tools(config))
    yield state
    await client.drain(0.0)
    thread.join(10)
    assert not thread.is_alive()
    await state.close()
    client.close()
    context.term()


@pytest.fixture
def service(toy_state: ServerState) -> GenerationService:
    """What generates on the toy engine."""
    return toy_state.service


@pytest.fixture
async def toy_url(toy_state: ServerState) -> AsyncIterator[str]:
    """Address of a server on the toy engine."""
    config = uvicorn.Config(
        create_app(toy_state), lifespan="off", ws="none", log_level="warning", timeout_graceful_shutdown=1
    )
    http = HttpServer(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        http.should_exit = True
        await serving
