"""Starts the engine's process and notices its end.

The child gets its configuration as JSON on standard input and connects to a socket in a private folder. It lives in a
session of its own, so that Ctrl-C reaches only the server, and the kernel kills it if the server dies without a word.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import zmq

from diptych.config import EngineConfig
from diptych.core.channel import open_socket
from diptych.core.messages import EngineLoad, Loading
from diptych.errors import Unavailable
from diptych.lifetime import die_with_parent
from diptych.server.client import EngineClient

ENGINE_COMMAND = (sys.executable, "-m", "diptych.engine.process")


class EngineProcess:
    """One engine child and the client connected to it.

    Args: config: what the engine gets. command: how to run it; `--endpoint ADDRESS` is appended. on_load, on_progress:
    as EngineClient's.
    Construct it in the main thread: the child dies with the thread that made it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: tuple[str, ...] = ENGINE_COMMAND,
        on_load: Callable[[EngineLoad], None] | None = None,
        on_progress: Callable[[Loading], None] | None = None,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="diptych-")
        endpoint = f"ipc://{self._folder}/engine"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = open_socket(self._context, endpoint, bind=True)
        self.client = EngineClient(socket, on_load=on_load, on_progress=on_progress)
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = subprocess.Popen(
            [*command, "--endpoint", endpoint],
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._write_config(json.dumps(dataclasses.asdict(config)).encode())
        threading.Thread(target=self._wait, args=(asyncio.get_running_loop(),), daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def wait(self) -> int:
        """Exit code, once the process has ended (negative: the signal that killed it)."""
        return await asyncio.shield(self._exit_code)

    async def stop(self, timeout_s: float = 5.0) -> int:
        """End the process (SIGTERM, then SIGKILL after `timeout_s`), close the client, remove the socket's folder."""
        if not self._exit_code.done():
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.wait(), timeout_s)
            except TimeoutError:
                self._process.kill()
        code = await self.wait()
        self.client.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def _write_config(self, text: bytes) -> None:
        if self._process.stdin is None:
            raise AssertionError("the engine was started without a pipe")
        try:
            self._process.stdin.write(text)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has died already; _wait reports that

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._note_exit, code)

    def _note_exit(self, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.client.receive_last()
        self.client.fail(Unavailable(f"the engine process {how}; see its log"))
        self._exit_code.set_result(code)
