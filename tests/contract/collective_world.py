"""A world of real rank processes (`collective_rank.py`), asked together and answered by each."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0

Answer = dict[str, object]


class RankWorld:
    """Starts `size` ranks; `ask` gives every rank the same request. without_kernels: a rank that has none."""

    def __init__(
        self,
        size: int,
        *,
        carrier: str = "shm",
        timeout_s: float = 30.0,
        pp: int = 1,
        without_kernels: int | None = None,
    ) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"file://{self._folder.name}/meeting"
        script = str(Path(__file__).with_name("collective_rank.py"))
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(size), meeting, str(timeout_s), carrier, str(pp)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment | ({"DIPTYCH_KERNELS": "off"} if rank == without_kernels else {}),
            )
            for rank in range(size)
        ]
        try:
            self.pids = [self.answer(rank)["pid"] for rank in range(size)]
        except EOFError:
            self.close()
            raise

    def ask(self, what: str, **arguments: object) -> list[Answer]:
        """Every rank's answer, in rank order."""
        for rank in range(self.size):
            self.begin(rank, what, **arguments)
        return [self.answer(rank) for rank in range(self.size)]

    def begin(self, rank: int, what: str, **arguments: object) -> None:
        """Ask one rank, whose answer is to be read later."""
        pipe = self.ranks[rank].stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode([what, arguments]) + b"\n")
        pipe.flush()

    def answer(self, rank: int) -> Answer:
        """The rank's next answer. Raises: TimeoutError."""
        pipe = self.ranks[rank].stdout
        assert pipe is not None
        if not select.select([pipe], [], [], WAIT_S)[0]:
            raise TimeoutError(f"rank {rank} says nothing for {WAIT_S:.0f} s")
        line = pipe.readline()
        if not line:
            raise EOFError(f"rank {rank} has ended with {self.ranks[rank].wait()}")
        return msgspec.json.decode(line)

    def kill(self, rank: int) -> None:
        """kill -9."""
        self.ranks[rank].kill()

    def resume(self, rank: int) -> None:
        """SIGCONT."""
        self.ranks[rank].send_signal(signal.SIGCONT)

    def stop(self, rank: int) -> None:
        """SIGSTOP."""
        self.ranks[rank].send_signal(signal.SIGSTOP)

    def close(self) -> list[int]:
        """End all ranks; their exit codes."""
        for process in self.ranks:
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + 20
        for process in self.ranks:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()
        return [process.returncode for process in self.ranks]
