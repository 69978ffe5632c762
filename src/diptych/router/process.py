"""The router's process, from start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket

import uvloop

from diptych.router.app import create_app
from diptych.router.config import RouterConfig
from diptych.router.state import RouterState
from diptych.server.listening import http_server, listen

logger = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def route(config: RouterConfig) -> int:
    """Route until SIGTERM or Ctrl-C. Returns the exit status. Raises: ConfigError if the port is taken."""
    listener = listen(config.host, config.port, flag="--port")
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_Routing(config, listener).run())
        finally:
            for number in _STOP_SIGNALS:  # all is stopped: an impatient Ctrl-C must not change the exit status
                signal.signal(number, signal.SIG_IGN)


class _Routing:
    """One run of the router."""

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Route, drain, stop."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        async with RouterState(self._config) as state:
            http = http_server(create_app(state))
            serving = asyncio.create_task(http.serve(sockets=[self._listener]))
            try:
                print(self._banner(), flush=True)
                await self._stop.wait()
                state.is_draining = True
                await self._drain(state)
            finally:
                http.should_exit = True
                http.force_exit = self._stop_now.is_set()
                await serving
        return 0

    def _banner(self) -> str:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        names = ", ".join(engine.url for engine in self._config.engines) or "no engine yet (POST /workers adds one)"
        return f"routing at http://{host}:{self._listener.getsockname()[1]} to {names}"

    async def _drain(self, state: RouterState) -> None:
        logger.info("shutting down: %d requests get up to %g s", state.num_open, self._config.drain_timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout):
                while state.num_open and not self._stop_now.is_set():
                    await asyncio.sleep(0.05)

    def _on_signal(self) -> None:
        """The first asks for a drain, the second for an end."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()
