"""A whole server on a fake engine: real sockets, a byte-level tokenizer, HTTP on a free port."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import tokenizers
import uvicorn
import zmq
from starlette.applications import Starlette
from tokenizers import decoders, models, pre_tokenizers

from diptych.config import EngineConfig, ModelConfig, ServerConfig, TransferConfig
from diptych.core.channel import open_socket
from diptych.metrics import ServerMetrics
from diptych.server.app import create_app
from diptych.server.client import EngineClient
from diptych.server.listening import HttpServer
from diptych.server.state import ServerState, load_text_tools


def _load_fake_engine() -> ModuleType:
    path = Path(__file__).parent / "fake_engine.py"
    spec = importlib.util.spec_from_file_location("fake_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_engine"] = module
    spec.loader.exec_module(module)
    return module


fake_engine_module = _load_fake_engine()


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module with FakeEngine."""
    return fake_engine_module


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


@dataclass
class World:
    """A running server and its engine."""

    engine: Any
    state: ServerState
    client: EngineClient
    http: httpx.AsyncClient
    url: str

    def say(self, text: str) -> None:
        """Have the engine answer every request with this text."""
        token_ids = self.encode(text)
        self.engine.script = lambda request: token_ids

    def encode(self, text: str) -> list[int]:
        return self.state.text.tokenizer.encode(text, add_special_tokens=False)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
        """Wait for something that happens soon."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_world(
    folder: Path, *, over_tcp: bool, transfer: TransferConfig | None = None, **server: Any
) -> AsyncIterator[World]:
    """A server on a fake engine. Args: over_tcp: behind uvicorn, else called directly. server: of ServerConfig."""
    config = EngineConfig(
        model=ModelConfig(model_path=str(folder)),
        transfer=transfer or TransferConfig(),
        server=replace(ServerConfig(served_model_name="fake", log_requests=False), **server),
    )
    socket_folder = tempfile.TemporaryDirectory(prefix="dt-")
    endpoint = f"ipc://{socket_folder.name}/e"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    state = ServerState(config, ServerMetrics(config.server.metrics_prefix, "fake"))
    client = EngineClient(open_socket(context, endpoint, bind=True), on_load=state.metrics.note_load)
    info = fake_engine_module.info_of(None if transfer is None else transfer.role)
    engine = fake_engine_module.FakeEngine(endpoint, info=info)
    engine.start()
    state.matchmaker.bind()
    state.matchmaker.open()
    try:
        state.become_ready(client, await client.start(), load_text_tools(config))
        app = create_app(state)
        async with serving_over_tcp(app) if over_tcp else nullcontext("http://test") as url:
            transport = None if over_tcp else httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(base_url=url, timeout=10, transport=transport) as http_client:
                yield World(engine, state, client, http_client, url)
    finally:
        await state.close()
        engine.stop()
        client.close()
        context.term()
        socket_folder.cleanup()


@asynccontextmanager
async def serving_over_tcp(app: Starlette) -> AsyncIterator[str]:
    """The application behind uvicorn on a free port; its address."""
    config = uvicorn.Config(app, lifespan="off", ws="none", log_level="warning", timeout_graceful_shutdown=1)
    http = HttpServer(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            http.should_exit = True
            await serving


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        yield Path(folder)


@pytest.fixture
async def world(tokenizer_folder: Path) -> AsyncIterator[World]:
    """The usual server, called directly: what it streams arrives at the end."""
    async with running_world(tokenizer_folder, over_tcp=False) as made:
        yield made


@pytest.fixture
async def tcp_world(tokenizer_folder: Path) -> AsyncIterator[World]:
    """The usual server behind a real port, for tests about connections."""
    async with running_world(tokenizer_folder, over_tcp=True) as made:
        yield made


@pytest.fixture(scope="session")
def make_world(tokenizer_folder: Path) -> Callable[..., Any]:
    """Context manager for a server with other settings: `async with make_world(api_key="k") as world`."""
    return lambda **server: running_world(tokenizer_folder, over_tcp=False, **server)
