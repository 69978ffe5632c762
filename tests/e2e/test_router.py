"""`diptych route` before `diptych serve`, all processes: kill, freeze, drain, restart, add, remove, disconnect."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

FAKE_SERVER = Path(__file__).parent / "fake_server.py"
START_S = 40.0
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
LONG = {"model": "fake", "prompt": "abc", "max_tokens": 400, "stream": True}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are bytes, and </s>."""
    folder = tmp_path_factory.mktemp("byte-tokenizer")
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@dataclass
class Processes:
    """Everything that the module's tests start. Each process leads a group of its own."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *command], start_new_session=True)
        self.running.append(process)
        return process

    def serve(self, port: int) -> subprocess.Popen[bytes]:
        return self.start(str(FAKE_SERVER), str(port), str(self.folder))

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def processes(tokenizer_folder: Path) -> Iterator[Processes]:
    made = Processes(tokenizer_folder)
    yield made
    made.stop()


@dataclass
class Cluster:
    """Two engines and a router, as processes."""

    processes: Processes
    ports: list[int]
    engines: list[subprocess.Popen[bytes]]
    router_url: str

    def url(self, index: int) -> str:
        return f"http://127.0.0.1:{self.ports[index]}"


@pytest.fixture(scope="module")
def cluster(processes: Processes) -> Cluster:
    ports = [free_port(), free_port()]
    engines = [processes.serve(port) for port in ports]
    port = free_port()
    urls = [f"http://127.0.0.1:{one}" for one in ports]
    flags = ["--port", str(port), "--policy", "round_robin", "--log-level", "warning"]
    processes.start("-m", "diptych", "route", *urls, *flags)
    return Cluster(processes, ports, engines, f"http://127.0.0.1:{port}")


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router, once both engines are in it and healthy: tests leave it so, or this restarts them."""
    for index, engine in enumerate(cluster.engines):
        if engine.poll() is not None:
            cluster.engines[index] = cluster.processes.serve(cluster.ports[index])
    async with httpx.AsyncClient(base_url=cluster.router_url, timeout=20) as client:
        await until(client, lambda states: list(states.values()) == ["healthy"] * 2, START_S)
        yield client


async def states_of(client: httpx.AsyncClient) -> dict[str, str]:
    with suppress(httpx.TransportError):
        workers = (await client.get("/workers")).json()["workers"]
        return {worker["url"]: worker["state"] for worker in workers}
    return {}


async def until(client: httpx.AsyncClient, condition: Callable[[dict[str, str]], bool], timeout_s: float) -> None:
    states: dict[str, str] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while not condition(states):
                states = await states_of(client)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"the pool did not get there: {states}") from None


async def open_stream(client: httpx.AsyncClient, found: Callable[[str], None]) -> list[dict[str, Any]]:
    """The events of a long answer; `found` is told the first as soon as it is there."""
    events = []
    async with client.stream("POST", "/v1/completions", json=LONG) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                found(line)
            elif line == "data: [DONE]":
                events.append({"done": True})
    return events


async def busy_index(cluster: Cluster, client: httpx.AsyncClient) -> int:
    """The engine that has a request now."""
    workers = (await client.get("/workers")).json()["workers"]
    (url,) = [worker["url"] for worker in workers if worker["active"]]
    return [cluster.url(index) for index in (0, 1)].index(url)


async def started_stream(cluster: Cluster, client: httpx.AsyncClient) -> tuple[asyncio.Task[list[dict[str, Any]]], int]:
    """A stream that has begun, and the engine that it comes from."""
    begun = asyncio.Event()
    task = asyncio.create_task(open_stream(client, lambda line: begun.set()))
    async with asyncio.timeout(10):
        await begun.wait()
    return task, await busy_index(cluster, client)


async def test_answers_are_the_engines_own(cluster: Cluster, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "mine"})
    async with httpx.AsyncClient() as direct:
        same = await direct.post(cluster.url(0) + "/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "mine"})
    assert answer.json()["choices"] == same.json()["choices"]
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("mine", "mine")
    assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["fake"]
    assert (await http.post("/tokenize", json={"prompt": "abc"})).json()["count"] == 3
    assert (await http.post("/flush_cache")).status_code == 200
    assert (await http.get("/health")).status_code == 200


async def test_a_killed_engine_ends_its_stream_and_nothing_else(cluster: Cluster, http: httpx.AsyncClient) -> None:
    stream, index = await started_stream(cluster, http)
    os.killpg(cluster.engines[index].pid, signal.SIGKILL)
    killed_at = time.monotonic()
    events = await stream
    assert time.monotonic() - killed_at < 2.0
    assert events[-2]["error"]["code"] == "engine_lost"
    assert events[-1] == {"done": True}
    answers = [await http.post("/v1/chat/completions", json=CHAT) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    await until(http, lambda states: states.get(cluster.url(index)) == "down", 3.0)
    cluster.engines[index].wait()


async def test_a_frozen_engine_is_found_out(cluster: Cluster, http: httpx.AsyncClient) -> None:
    index = 0
    os.kill(cluster.engines[index].pid, signal.SIGSTOP)
    frozen_at = time.monotonic()
    try:
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=CHAT) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert time.monotonic() - frozen_at < 5.0
        assert (await states_of(http))[cluster.url(index)] == "down"
    finally:
        os.kill(cluster.engines[index].pid, signal.SIGCONT)
    await until(http, lambda states: states.get(cluster.url(index)) == "healthy", 5.0)


async def test_a_draining_engine_finishes_and_gets_nothing_new(cluster: Cluster, http: httpx.AsyncClient) -> None:
    begun = asyncio.Event()
    short = {**LONG, "max_tokens": 60}

    async def whole() -> str:
        async with http.stream("POST", "/v1/completions", json=short) as answer:
            return "".join([text async for text in answer.aiter_text() if begun.set() is None])

    stream = asyncio.create_task(whole())
    await begun.wait()
    index = await busy_index(cluster, http)
    cluster.engines[index].send_signal(signal.SIGTERM)
    answers = [await http.post("/v1/chat/completions", json=CHAT) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
    text = await stream
    assert '"finish_reason":"length"' in text
    assert "error" not in text
    assert cluster.engines[index].wait(timeout=20) == 0


async def test_a_client_that_goes_frees_the_engine(cluster: Cluster, http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/completions", json=LONG) as answer:
        await anext(answer.aiter_text())
        index = await busy_index(cluster, http)
    async with httpx.AsyncClient(base_url=cluster.url(index)) as direct, asyncio.timeout(1.0):
        while (await direct.get("/load")).json()["server_load"]:
            await asyncio.sleep(0.01)


async def test_an_engine_comes_and_goes(cluster: Cluster, http: httpx.AsyncClient) -> None:
    url = cluster.url(1)
    removed = await http.request("DELETE", "/workers", json={"url": url})
    assert removed.json()["state"] == "removed"
    assert list(await states_of(http)) == [cluster.url(0)]
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert (await http.post("/workers", json={"url": url})).status_code == 202
    await until(http, lambda states: states.get(url) == "healthy", 5.0)


async def test_when_all_are_gone_the_client_is_told_to_come_back(cluster: Cluster, http: httpx.AsyncClient) -> None:
    for engine in cluster.engines:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
    started = time.monotonic()
    answer = await http.post("/v1/chat/completions", json=CHAT)
    assert time.monotonic() - started < 2.0
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    await until(http, lambda states: set(states.values()) == {"down"}, 4.0)
    assert (await http.get("/health")).status_code == 503
    metrics = (await http.get("/metrics")).text
    assert 'diptych_router_engines{role="unified",state="down"} 2.0' in metrics
