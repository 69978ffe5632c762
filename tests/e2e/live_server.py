"""Real servers: `diptych serve` as its own process, with the demo model or with a tiny one made here.

A server takes a free port by itself and prints it. Each is ended by its fixture.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT_S = 100.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class LiveServer:
    """A server that runs. name: of its model. log: what it has printed, both streams."""

    url: str
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def engine_pid(self) -> int:
        """Process id of its engine, its only child."""
        (engine,) = psutil.Process(self.process.pid).children()
        return engine.pid

    def get(self, path: str) -> Any:
        """A JSON answer."""
        return httpx.get(self.url + path, timeout=60).raise_for_status().json()

    def post(self, path: str, body: object) -> Any:
        """A JSON answer to a JSON body."""
        return httpx.post(self.url + path, json=body, timeout=60).raise_for_status().json()

    def load(self) -> dict[str, Any]:
        """The engine's load with its page books."""
        entry: dict[str, Any] = self.get("/v1/loads?include=core,memory")["loads"][0]
        return entry

    def wait_until_idle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Its load once nothing runs, waits or owns pages."""
        return wait_for(lambda: _idle_load(self.load()), timeout_s, "the server is still busy")

    def wait_for_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit status."""
        return self.process.wait(timeout_s)


def _idle_load(load: dict[str, Any]) -> dict[str, Any] | None:
    is_idle = load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0 and load["utilization"] == 0
    return load if is_idle else None


def wait_for(condition: Callable[[], Any], timeout_s: float, failure: str) -> Any:
    """The first true value of `condition`, tried until then."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, failure
        time.sleep(0.02)
    return value


@contextmanager
def run_server(folder: Path, *arguments: str, name: str) -> Iterator[LiveServer]:
    """`diptych serve` with these arguments; SIGTERM at the end, SIGKILL if that does not help."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "diptych", "serve", *arguments, "--port", "0", "--served-model-name", name]
    with log.open("wb") as file:
        # A session of its own, so that Ctrl-C in the terminal reaches pytest, which then ends it.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield LiveServer(_wait_for_url(process, log), name, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    def url() -> str | None:
        text = log.read_text()
        assert process.poll() is None, f"the server did not start:\n{text}"
        found = re.search(r"serves .* at (http://\S+)", text)
        return found and found[1]

    return str(wait_for(url, START_TIMEOUT_S, "the server did not get ready"))
