"""Two engines exchange their roles while clients send: no request fails or answers otherwise, and pages flow the other
way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, run_server, wait_for

FLAGS = ("--kv-cache-memory", "16MiB", "--num-threads", "1", "--dtype", "float32", "--max-model-len", "1024")
PORT = ("--disaggregation-bootstrap-port", "0")
NUM_CLIENTS = 3


@pytest.fixture
def engines(tiny_model: Path, tmp_path: Path) -> Iterator[list[LiveServer]]:
    with ExitStack() as stack:
        started = []
        for role in ("prefill", "decode"):
            (tmp_path / role).mkdir()
            command = (str(tiny_model), *FLAGS, *PORT, "--role", role)
            started.append(stack.enter_context(run_server(tmp_path / role, *command, name="tiny-llama")))
        yield started


class Clients:
    """Send one prompt after the other to `target`, with `rendezvous`, until told to stop. answers: text by prompt."""

    def __init__(self, target: LiveServer, rendezvous: dict[str, Any]) -> None:
        self.route = (target, rendezvous)
        self.answers: dict[str, str] = {}
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _send(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            target, rendezvous = self.route
            prompt = f"client {number} says {turn}: " + "what one has seen the other may tell. " * (1 + turn % 3)
            turn += 1
            try:
                self.answers[prompt] = complete(target, prompt, rendezvous)
            except Exception as error:
                self.failures.append(f"{prompt!r} to {target.url}: {error!r}")

    def wait_for_more(self, count: int) -> None:
        goal = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= goal or self.failures, 30, "the clients get no answers")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def complete(target: LiveServer, prompt: str, rendezvous: dict[str, Any]) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **rendezvous}
    return str(target.post("/v1/completions", body)["choices"][0]["text"])


def switch(engine: LiveServer, role: str) -> dict[str, Any]:
    """Where its registry is afterwards, as a decode engine is told."""
    httpx.post(engine.url + "/pd_role_switch", json={"new_role": role}, timeout=30).raise_for_status()
    return registry_of(engine)


def registry_of(engine: LiveServer) -> dict[str, Any]:
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": engine.get("/server_info")["disaggregation_bootstrap_port"],
    }


def rooms_done(engine: LiveServer) -> int:
    return int(engine.get("/v1/loads?include=core,disagg")["loads"][0]["disaggregation"]["rooms_done"])


def test_roles_change_under_load(engines: list[LiveServer]) -> None:
    first, second = engines
    clients = Clients(second, registry_of(first))
    try:
        clients.wait_for_more(10)
        before = rooms_done(second)
        assert before > 0
        switch(first, "decode")
        clients.wait_for_more(5)  # nobody is there to ask: they are computed where they are decoded
        clients.route = (first, {})
        clients.wait_for_more(NUM_CLIENTS + 2)
        second.wait_until_idle()
        clients.route = (first, switch(second, "prefill"))
        swapped = rooms_done(first)
        clients.wait_for_more(15)
        assert rooms_done(first) > swapped
    finally:
        clients.stop()
    assert not clients.failures
    for engine in engines:
        engine.wait_until_idle()
    reference = engines[0]
    for prompt, text in clients.answers.items():
        assert complete(reference, prompt, {}) == text
