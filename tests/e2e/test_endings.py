"""How streams, clients, engines and servers end: nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import psutil

LONG = {"model": "tiny", "prompt": "abcdefgh" * 8, "max_tokens": 3000, "ignore_eos": True, "stream": True}


async def events_of(http: httpx.AsyncClient, body: dict) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


def connect(live) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=live.url, timeout=60, limits=httpx.Limits(max_connections=None))


class Reader:
    """Reads one stream in a task; `events` grows, `ended` is when it was over, or the test hung up."""

    def __init__(self, http: httpx.AsyncClient, body: dict) -> None:
        self.events: list[str] = []
        self.begun = asyncio.Event()
        self.ended = 0.0
        self.task = asyncio.create_task(self._read(http, body))

    async def _read(self, http: httpx.AsyncClient, body: dict) -> None:
        try:
            async with aclosing(events_of(http, body)) as events:
                async for event in events:
                    self.events.append(event)
                    self.begun.set()
        finally:
            self.begun.set()
            self.ended = time.monotonic()


async def read_many(http: httpx.AsyncClient, count: int, body: dict) -> list[Reader]:
    """Streams of which each has begun."""
    readers = [Reader(http, body) for _ in range(count)]
    for reader in readers:
        await reader.begun.wait()
        assert reader.events
    return readers


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_sigterm_lets_streams_finish(start_tiny):
    with start_tiny() as live:
        engine_pid = live.engine_pid
        async with connect(live) as http:
            readers = await read_many(http, 4, {**LONG, "max_tokens": 200})
            live.process.send_signal(signal.SIGTERM)
            # The port still answers while streams finish, and says that it takes nothing new.
            statuses = [(await http.get("/health")).status_code]
            refused = await http.post("/v1/completions", json={**LONG, "stream": False})
            await asyncio.gather(*(reader.task for reader in readers))
        assert statuses == [503]
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        for reader in readers:
            *_, last, done = reader.events
            assert json.loads(last)["choices"][0]["finish_reason"] == "length"
            assert done == "[DONE]"
        assert live.wait_for_exit() == 0
        assert not is_running(engine_pid)
        assert "Traceback" not in live.log.read_text()


async def test_sigterm_ends_streams_at_the_drain_limit(start_tiny):
    with start_tiny("--drain-timeout", "0.5") as live:
        async with connect(live) as http:
            readers = await read_many(http, 4, {**LONG, "max_tokens": 3900})
            live.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*(reader.task for reader in readers))
        for reader in readers:
            assert reader.events[-1] == "[DONE]"
        assert live.wait_for_exit() == 0


async def test_killed_engine_fails_every_stream_at_once(start_tiny):
    with start_tiny() as live:
        async with connect(live) as http:
            readers = await read_many(http, 8, LONG)
            whole = asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": False}))
            await asyncio.sleep(0.2)
            killed = time.monotonic()
            os.kill(live.engine_pid, signal.SIGKILL)
            await asyncio.gather(*(reader.task for reader in readers))
            answer = await whole
        for reader in readers:
            assert reader.ended - killed < 1.0
            *_, last, done = reader.events
            error = json.loads(last)["error"]
            assert "signal 9" in error["message"]
            assert done == "[DONE]"
        assert answer.status_code == 503
        assert live.wait_for_exit() == 1
        assert "ended unexpectedly" in live.log.read_text()


async def test_killed_server_takes_its_engine_along(start_tiny):
    with start_tiny() as live:
        engine_pid = live.engine_pid
        live.process.kill()
        live.process.wait()
        deadline = time.monotonic() + 10
        while is_running(engine_pid):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_disconnects_and_aborts_give_everything_back(start_tiny):
    with start_tiny("--max-num-seqs", "8", "--max-num-batched-tokens", "16") as live:
        async with connect(live) as http:
            # More than there are slots: some decode, some are in the middle of their prompt, some wait.
            readers = [Reader(http, {**LONG, "prompt": f"{index} " * 300, "rid": f"r{index}"}) for index in range(24)]
            plain = asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": False}))
            while (await asyncio.to_thread(live.load))["num_waiting_reqs"] != 25 - 8:
                await asyncio.sleep(0.01)
            for reader in readers[:12]:
                reader.task.cancel()
            plain.cancel()
            answer = await http.post("/abort_request", json={"rid": [f"r{index}" for index in range(12, 24)]})
            assert answer.status_code == 200
            await asyncio.gather(*(reader.task for reader in readers[12:]))
            for reader in readers[12:]:
                *_, last, done = reader.events
                assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
                assert done == "[DONE]"
        memory = (await asyncio.to_thread(live.wait_until_idle))["memory"]
        assert memory["num_free_pages"] + memory["num_cached_pages"] == memory["num_pages"]
        assert (await asyncio.to_thread(live.get, "/load"))["server_load"] == 0
        assert httpx.post(f"{live.url}/flush_cache").status_code == 200
        assert live.load()["memory"]["num_free_pages"] == memory["num_pages"]


async def test_full_queue_is_503_with_retry_after(start_tiny):
    with start_tiny("--max-num-seqs", "1", "--max-queued-requests", "2") as live:
        async with connect(live) as http:
            (first,) = await read_many(http, 1, LONG)
            waiting = [Reader(http, {**LONG, "max_tokens": 1}) for _ in range(2)]
            while (await asyncio.to_thread(live.load))["num_waiting_reqs"] < 2:
                await asyncio.sleep(0.01)
            refused = await http.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
            first.task.cancel()
            await asyncio.gather(*(reader.task for reader in waiting))
            assert all(reader.events[-1] == "[DONE]" for reader in waiting)


def test_missing_model_ends_with_a_sentence(tmp_path):
    command = [sys.executable, "-m", "diptych", "serve", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr
