"""The processes of the ranks that run on this node: started, watched, ended. None outlives the thread that started it.

Knows nothing of batches. Used by the engine on node 0, and by `engine.node` on the others. Never imports torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from diptych import env
from diptych.config import EngineConfig
from diptych.core.ranks import ProcessLost
from diptych.resolve import placement

RANK_COMMAND = (sys.executable, "-m", "diptych.engine.rank")
WATCH_INTERVAL_S = 0.05
# A shorter stop is waited for: it may be a debugger, or a machine that is being moved.
STOPPED_S = 1.0


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is told on its standard input.

    endpoint: of its engine. init_method: where the ranks meet, as torch.distributed spells it. parent_pid: the process
    that started it.
    """

    config: EngineConfig
    rank: int
    endpoint: str
    init_method: str
    parent_pid: int


def rank_starts(config: EngineConfig, *, endpoint: str, init_method: str) -> list[RankStart]:
    """One for each rank of this node. Args: config: resolved."""
    return [
        RankStart(config=config, rank=rank, endpoint=endpoint, init_method=init_method, parent_pid=os.getpid())
        for rank in placement(config.parallel).local_ranks
    ]


class RankProcess:
    """One rank's process. Start it on a thread that lives as long as it is wanted: it dies with that."""

    def __init__(self, start: RankStart, command: tuple[str, ...]) -> None:
        self.rank = start.rank
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, env=_environment(start.init_method)
        )
        assert self._process.stdin is not None, "it was started with a pipe"
        try:
            with self._process.stdin as pipe:
                pipe.write(msgspec.json.encode(start))
        except BrokenPipeError:
            pass  # it has died already; the watch tells
        self._stopped_since: float | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def trouble(self, now: float) -> str | None:
        """A sentence if the process has ended, or has been stopped for a while."""
        name = f"rank {self.rank} (process {self.pid})"
        code = self._process.poll()
        if code is not None:
            if code >= 0:
                return f"{name} has ended with exit code {code}; its log says why"
            return f"{name} was killed by {_signal_name(-code)}"
        if not _is_stopped(self.pid):
            self._stopped_since = None
            return None
        if self._stopped_since is None:
            self._stopped_since = now
        return f"{name} is stopped (SIGSTOP?)" if now - self._stopped_since >= STOPPED_S else None

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends within this time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once, stopped or not."""
        self._process.kill()
        self._process.wait()


class RankProcesses:
    """All ranks of this node, and a thread that watches them.

    Args: command: how to run one; it is told its `RankStart` on standard input.
    """

    def __init__(self, starts: Iterable[RankStart], command: tuple[str, ...]) -> None:
        self._ranks: list[RankProcess] = []
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            for start in starts:
                self._ranks.append(RankProcess(start, command))
        except BaseException:
            self.close(0.0)
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [rank.pid for rank in self._ranks]

    def watch(self, on_lost: Callable[[ProcessLost], None]) -> None:
        """Begin to watch. Args: on_lost: called on the watching thread when a process has ended or been stopped."""
        self._watcher = threading.Thread(target=self._watch, args=(on_lost,), name="diptych-ranks", daemon=True)
        self._watcher.start()

    def close(self, grace_s: float) -> None:
        """End all: those that have not ended by themselves after `grace_s` seconds are killed."""
        self._is_over.set()
        if self._watcher is not None:
            self._watcher.join()
        deadline = time.monotonic() + grace_s
        for rank in self._ranks:
            if not rank.wait(max(0.0, deadline - time.monotonic())):
                rank.kill()

    def _watch(self, on_lost: Callable[[ProcessLost], None]) -> None:
        watched = list(self._ranks)
        while not self._is_over.wait(WATCH_INTERVAL_S):
            for rank in list(watched):
                trouble = rank.trouble(time.monotonic())
                if trouble is not None:
                    watched.remove(rank)
                    on_lost(ProcessLost(rank.rank, trouble))


def _environment(init_method: str) -> dict[str, str]:
    """Where all ranks are on this machine, gloo must not listen where its host name leads."""
    is_local = init_method.startswith("file:") or "://127.0.0.1:" in init_method
    return env.of_child(**({"GLOO_SOCKET_IFNAME": "lo"} if is_local else {}))


def _is_stopped(pid: int) -> bool:
    """Whether the kernel says so; False where it says nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return text[text.rfind(b")") + 2 :].startswith(b"T")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
