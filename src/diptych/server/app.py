"""The server's process: the ASGI application, and `serve`, which runs it from start to exit.

`serve` binds the port first, answers /health with 503 while its engine loads, and on SIGTERM or Ctrl-C lets running
requests finish. Its engine never outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from diptych.config import EngineConfig, ServerConfig
from diptych.engine.roles import initial_role
from diptych.errors import ConfigError, DiptychError
from diptych.metrics import ServerMetrics
from diptych.server.adapters import ServedAdapters
from diptych.server.auth import ApiKeyMiddleware
from diptych.server.client import EngineClient
from diptych.server.errors import json_response, on_diptych_error, on_http_error, on_unexpected_error
from diptych.server.listening import http_server, listen
from diptych.server.openapi import openapi_document
from diptych.server.process import ENGINE_COMMAND, EngineProcess
from diptych.server.progress import LoadingReport, banner
from diptych.server.routes import ROUTES, Handler
from diptych.server.state import ServerState, load_text_tools
from diptych.server.streaming import ClientGone, on_client_gone

logger = logging.getLogger(__name__)

_DRAIN_GRACE_S = 5.0  # for the engine to say that it has drained
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def create_app(state: ServerState) -> Starlette:
    """The ASGI application over `state`, which may become ready later."""
    document = openapi_document(ROUTES, has_api_key=state.config.server.api_key is not None)

    async def openapi(_: Request) -> Response:
        return json_response(document)

    routes: list[BaseRoute] = [
        Route(spec.path, _endpoint(state, spec.handler), methods=spec.methods) for spec in ROUTES
    ]
    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        DiptychError: on_diptych_error,
        HTTPException: on_http_error,
        ClientGone: on_client_gone,
        Exception: on_unexpected_error,
    }
    api_key = state.config.server.api_key
    middleware = [] if api_key is None else [Middleware(ApiKeyMiddleware, api_key=api_key)]
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
    app.router.redirect_slashes = False
    return app


def _endpoint(state: ServerState, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(state, request)

    return endpoint


def print_banner(state: ServerState, port: int) -> None:
    """Say what is served where."""
    print(banner(state.ready_info, state.config.server, state.model_name, port), flush=True)


def serve(
    config: EngineConfig,
    *,
    engine_command: tuple[str, ...] = ENGINE_COMMAND,
    on_ready: Callable[[ServerState, int], None] = print_banner,
) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status: 0, or 1 if the engine failed.

    Args: config: resolved. engine_command: how to run an engine. on_ready: called with the port once requests are
    served.
    Raises: ConfigError if a port is taken or the model cannot be served.
    """
    listener = bind(config.server)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_Serving(config, listener, engine_command=engine_command, on_ready=on_ready).run())
        finally:
            # All is stopped: an impatient Ctrl-C must not turn the exit status into that of a kill.
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises: ConfigError if the address cannot be had."""
    return listen(config.host, config.port, flag="--port")


class _Serving:
    """One run of the server, from start to exit."""

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        *,
        engine_command: tuple[str, ...],
        on_ready: Callable[[ServerState, int], None],
    ) -> None:
        self._config = config
        self._listener = listener
        self._engine_command = engine_command
        self._on_ready = on_ready
        name = config.server.served_model_name or ""
        engine_type = initial_role(config.transfer)
        self._state = ServerState(config, ServerMetrics(config.server.metrics_prefix, name, engine_type=engine_type))
        self._state.matchmaker.bind()
        self._http = http_server(create_app(self._state))
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Start, serve, drain, stop."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        self._state.matchmaker.open()
        report = LoadingReport()
        try:
            with report:
                engine = EngineProcess(
                    self._config,
                    command=self._engine_command,
                    on_load=self._state.metrics.note_load,
                    on_progress=report,
                )
                self._state.client = engine.client
                starting = asyncio.create_task(self._start(engine))
                await _first_of(starting, self._stop.wait())
            try:
                return await self._serve(engine, starting)
            finally:
                starting.cancel()
                await engine.stop()
        finally:
            await self._state.close()
            self._http.should_exit = True
            self._http.force_exit = self._stop_now.is_set()
            await http

    async def _start(self, engine: EngineProcess) -> None:
        """Wait for the engine while the tokenizer loads. Raises: ConfigError, or Unavailable if the engine fails."""
        text, info = await asyncio.gather(asyncio.to_thread(load_text_tools, self._config), engine.client.start())
        adapters = ServedAdapters(engine.client, self._config)
        await adapters.load_configured()
        self._state.become_ready(engine.client, info, text, adapters)
        self._on_ready(self._state, self._listener.getsockname()[1])

    async def _serve(self, engine: EngineProcess, starting: asyncio.Task[None]) -> int:
        if starting.done():
            try:
                starting.result()
            except ConfigError:
                raise
            except DiptychError as error:
                logger.error("cannot start: %s", error)
                return 1
            await _first_of(engine.wait(), self._stop.wait())
        if not self._stop.is_set():
            logger.error(
                "the engine process has ended unexpectedly (exit code %d); the server stops", await engine.wait()
            )
            return 1
        if starting.done():
            await self._drain(engine.client)
        return 0

    async def _drain(self, client: EngineClient) -> None:
        timeout_s = self._config.server.drain_timeout
        logger.info("shutting down: %d requests get up to %g s to finish", client.num_open, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s + _DRAIN_GRACE_S):
                await _first_of(client.drain(timeout_s), self._stop_now.wait())

    def _on_signal(self) -> None:
        """The first asks for a drain, the second for an end."""
        self._state.is_draining = True
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


async def _first_of(*waits: Awaitable[Any]) -> None:
    """Return when one is done; those that are not are cancelled, except tasks, which belong to others."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, future in zip(waits, futures, strict=True):
            if future is not wait:
                future.cancel()
