"""`diptych serve` over several ranks: the same answers as one, and an end that leaves nothing, whoever is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from live_server import LiveServer
from test_endings import LONG, connect, is_running, read_many

PROMPTS = ["abcdefgh" * 8, "hello", "the quick brown fox " * 8]


def ranks_of(live: LiveServer) -> list[int]:
    """Process ids of the engine's ranks."""
    return [child.pid for child in psutil.Process(live.engine_pid).children()]


def answers(live: LiveServer) -> list[list[int]]:
    """Greedy and seeded outputs."""
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    seeded = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}
    return [
        live.post("/generate", {"text": prompt, "sampling_params": sampling})["output_ids"]
        for prompt in PROMPTS
        for sampling in (greedy, seeded)
    ]


@pytest.fixture
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test may leave neither files nor shared memory."""
    folder = tmp_path_factory.mktemp("t")  # paths of sockets must be short
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert not list(folder.iterdir())
    assert not [path for path in Path("/dev/shm").iterdir() if "diptych" in path.name]


@pytest.mark.parametrize("flags", [("--tp", "2", "--dp", "2"), ("--pp", "2"), ("--tp", "2", "--pp", "2")])
def test_ranks_answer_as_one(tiny_server: LiveServer, start_tiny: Callable[..., LiveServer], flags) -> None:
    with start_tiny("--dtype", "float32", "--max-model-len", "256", *flags) as live:
        info = live.get("/server_info")
        assert (
            len(ranks_of(live))
            == info["tp_size"] * info["pp_size"]
            == 2 * flags.count("--tp") + 2 * flags.count("--pp")
        )
        assert answers(live) == answers(tiny_server)
        pids = [live.engine_pid, *ranks_of(live)]
        live.process.send_signal(signal.SIGTERM)
        assert live.wait_for_exit() == 0
        assert not any(map(is_running, pids))
        assert "Traceback" not in live.log.read_text()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("flags", "rank", "number", "limit_s"),
    [
        (("--tp", "2"), 0, signal.SIGKILL, 1.5),
        (("--tp", "2"), 1, signal.SIGSTOP, 3.5),
        (("--pp", "2"), 1, signal.SIGKILL, 3.0),
        (("--pp", "2"), 0, signal.SIGSTOP, 3.5),
    ],
)
async def test_a_lost_rank_ends_every_stream(start_tiny, flags, rank: int, number: int, limit_s: float) -> None:
    with start_tiny(*flags) as live:
        pids = [live.engine_pid, *ranks_of(live)]
        lost = pids[1 + rank]
        async with connect(live) as http:
            readers = await read_many(http, 4, LONG)
            began = time.monotonic()
            os.kill(lost, number)
            await asyncio.gather(*(reader.task for reader in readers))
        for reader in readers:
            assert reader.ended - began < limit_s
            *_, last, done = reader.events
            assert f"rank {rank} (process {lost})" in last
            assert done == "[DONE]"
        assert live.wait_for_exit() == 1
        assert not any(map(is_running, pids))


@pytest.mark.usefixtures("nothing_is_left")
def test_a_killed_engine_takes_its_ranks_along(start_tiny) -> None:
    with start_tiny("--tp", "2") as live:
        pids = ranks_of(live)
        os.kill(live.engine_pid, signal.SIGSTOP)
        os.kill(live.engine_pid, signal.SIGKILL)
        assert live.wait_for_exit() == 1
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
        assert not any(map(is_running, pids))
