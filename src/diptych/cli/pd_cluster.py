"""Engines as child processes and a router before them, from start to exit; what `diptych pd` runs.

The children live in sessions of their own, so that Ctrl-C reaches only this process, and the kernel kills them if it
dies without a word. Their logs pass through here, each line with its engine's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from diptych.cli.pd_engine import EngineReady
from diptych.config import EngineConfig
from diptych.errors import Unavailable
from diptych.lifetime import die_with_parent
from diptych.router.app import create_app
from diptych.router.config import EngineAddress, Role, RouterConfig
from diptych.router.member import Member, State
from diptych.router.state import RouterState
from diptych.server.listening import http_server, listen

logger = logging.getLogger(__name__)

ENGINE_PROGRAM = (sys.executable, "-m", "diptych.cli.pd_engine")
ENDING_S = 2.0
JOIN_TIMEOUT_S = 30.0
STOP_GRACE_S = 10.0
STOP_NOW_S = 3.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """An engine to start. name: for people, such as "prefill-0". config: resolved; its server takes a free port."""

    name: str
    role: Role
    config: EngineConfig


class EngineChild:
    """One engine's server process. Start it on the main thread: it dies with the thread that made it."""

    def __init__(self, plan: EnginePlan, process: asyncio.subprocess.Process, ready: asyncio.Task[EngineReady]) -> None:
        self.plan = plan
        self.ready = ready
        self.ended = asyncio.create_task(process.wait())
        self._process = process
        self._log = asyncio.create_task(self._copy_log())

    @classmethod
    async def start(cls, plan: EnginePlan, program: Sequence[str]) -> EngineChild:
        """Start the process; it may take minutes until it is ready."""
        ready_read, ready_write = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *program,
            "--ready-fd",
            str(ready_write),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(ready_write,),
            preexec_fn=die_with_parent(os.getpid()),
        )
        os.close(ready_write)
        ready = asyncio.create_task(_read_ready(plan.name, ready_read))
        assert process.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died already; `ended` tells
            process.stdin.write(msgspec.json.encode(plan.config))
            await process.stdin.drain()
            process.stdin.close()
        return cls(plan, process, ready)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.ended.done()

    def terminate(self) -> None:
        """Ask it to finish what it has and to end; a second time, to end at once."""
        if self.is_alive:
            self._process.terminate()

    async def close(self) -> None:
        """Kill it if it still runs, and wait for the end of its log."""
        if self.is_alive:
            logger.warning("%s does not end; it is killed", self.plan.name)
            self._process.kill()
        await self.ended
        self.ready.cancel()
        await asyncio.gather(self._log, self.ready, return_exceptions=True)

    async def _copy_log(self) -> None:
        stream, prefix, held = self._process.stdout, f"{self.plan.name:<9} | ".encode(), b""
        assert stream is not None, "it was started with a pipe"
        while chunk := await stream.read(1 << 16):
            *lines, held = (held + chunk).split(b"\n")
            _write_log(b"".join(prefix + line + b"\n" for line in lines))
        if held:
            _write_log(prefix + held + b"\n")


def _write_log(text: bytes) -> None:
    sys.stderr.buffer.write(text)
    sys.stderr.buffer.flush()


async def _read_ready(name: str, fd: int) -> EngineReady:
    """The line that an engine writes when it serves. Raises: Unavailable if it closes the descriptor without."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    try:
        line = await reader.readline()
    finally:
        transport.close()
    if not line:
        raise Unavailable(f"{name} ended before it was ready; its log says why")
    return msgspec.json.decode(line, type=EngineReady)


def run_cluster(
    plans: Sequence[EnginePlan],
    router: RouterConfig,
    *,
    needs_prefill: bool,
    on_ready: Callable[[int, Sequence[EngineChild]], None],
    program: Sequence[str] | None = None,
) -> int:
    """Run engines and router until SIGTERM or Ctrl-C. Returns 0, or 1 if they did not start or none is left.

    Args: plans: the engines. router: resolved. needs_prefill: decode engines cannot do without. on_ready: called with
    the router's port once all serve. program: how to run an engine; default:
    ENGINE_PROGRAM.
    Raises: ConfigError if the router's port is taken.
    """
    with (
        listen(router.host, router.port, flag="--port") as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        cluster = _Cluster(
            plans, router, needs_prefill=needs_prefill, on_ready=on_ready, program=program or ENGINE_PROGRAM
        )
        try:
            return runner.run(cluster.run(listener))
        finally:
            for number in _STOP_SIGNALS:  # all is stopped: an impatient Ctrl-C must not change the exit status
                signal.signal(number, signal.SIG_IGN)


class _Cluster:
    """One run, from start to exit."""

    def __init__(
        self,
        plans: Sequence[EnginePlan],
        router: RouterConfig,
        *,
        needs_prefill: bool,
        on_ready: Callable[[int, Sequence[EngineChild]], None],
        program: Sequence[str],
    ) -> None:
        self._plans = plans
        self._router = router
        self._needs_prefill = needs_prefill
        self._on_ready = on_ready
        self._program = program
        self._children: list[EngineChild] = []
        self._members: dict[EngineChild, Member] = {}
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, listener: socket.socket) -> int:
        """Start, serve, drain, stop."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._run_router(listener)
        finally:
            await self._stop_engines()

    async def _run_router(self, listener: socket.socket) -> int:
        async with RouterState(self._router) as state:
            http = http_server(create_app(state))
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            try:
                code = await self._run_engines(state, listener.getsockname()[1])
                await self._drain(state)
            finally:
                http.should_exit = True
                http.force_exit = self._stop_now.is_set()
                await serving
        return code

    async def _run_engines(self, state: RouterState, port: int) -> int:
        for plan in self._plans:
            self._children.append(await EngineChild.start(plan, self._program))
        starting = asyncio.create_task(self._join(state))
        await self._first_of(starting, *(child.ended for child in self._children))
        if self._stop.is_set():
            starting.cancel()
            return 0
        if not starting.done() or starting.exception() is not None:
            # A dying engine's pipe closes a moment before its end is known.
            await asyncio.wait(
                [child.ended for child in self._children], timeout=ENDING_S, return_when=asyncio.FIRST_COMPLETED
            )
            self._report_failed_start(starting)
            return 1
        self._on_ready(port, self._children)
        return await self._watch(state)

    async def _join(self, state: RouterState) -> None:
        """Give the router each engine as it gets ready, and wait until it uses them all."""
        for child in self._children:
            ready = await child.ready
            url = f"http://127.0.0.1:{ready.port}"
            logger.info("%s serves at %s (process %d)", child.plan.name, url, child.pid)
            # Its role and registry are asked for, now and then: they can change while it runs.
            self._members[child] = state.pool.add(EngineAddress(url=url))
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while not all(member.state is State.HEALTHY for member in self._members.values()):
                await asyncio.sleep(0.05)

    def _report_failed_start(self, starting: asyncio.Task[None]) -> None:
        dead = [child for child in self._children if not child.is_alive]
        for child in dead:
            logger.error(
                "%s ended with exit code %d before all were ready; its log says why",
                child.plan.name,
                child.ended.result(),
            )
        if not dead and starting.done():
            logger.error("the engines cannot be used: %r", starting.exception())
        starting.cancel()

    async def _watch(self, state: RouterState) -> int:
        """Until it is time to stop; returns the exit status."""
        living = list(self._children)
        while True:
            await self._first_of(*(child.ended for child in living))
            if self._stop.is_set():
                return 0
            for child in [child for child in living if not child.is_alive]:
                living.remove(child)
                logger.error("%s has ended unexpectedly (exit code %d)", child.plan.name, child.ended.result())
                state.watch.hurry(self._members[child])
            roles = {child.plan.role for child in living}
            if Role.DECODE not in roles or (self._needs_prefill and Role.PREFILL not in roles):
                logger.error("no request can be served any more; all stops")
                return 1
            logger.warning("going on with %s", ", ".join(child.plan.name for child in living))

    async def _drain(self, state: RouterState) -> None:
        state.is_draining = True
        if state.num_open and not self._stop_now.is_set():
            logger.info("shutting down: %d requests get up to %g s", state.num_open, self._router.drain_timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._router.drain_timeout):
                while state.num_open and not self._stop_now.is_set():
                    await asyncio.sleep(0.05)

    async def _stop_engines(self) -> None:
        """Ask them to finish, then to end at once, then end them."""
        impatience = asyncio.create_task(self._stop_now.wait())
        for patience_s in (STOP_GRACE_S, STOP_NOW_S):
            for child in self._children:
                child.terminate()
            ends = asyncio.create_task(self._all_ended())
            hurry = [] if impatience.done() else [impatience]
            await asyncio.wait([ends, *hurry], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        impatience.cancel()
        await asyncio.gather(*(child.close() for child in self._children))

    async def _all_ended(self) -> None:
        await asyncio.gather(*(asyncio.shield(child.ended) for child in self._children))

    async def _first_of(self, *tasks: asyncio.Task[Any]) -> None:
        """Return when one is done, or when it is time to stop."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    def _on_signal(self) -> None:
        """The first asks for a drain, the second for an end."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()
