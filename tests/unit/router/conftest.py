"""Scripted engines and a router in front of them, all behind real ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from diptych.router.app import create_app
from diptych.router.config import EngineAddress, Role, RouterConfig
from diptych.router.member import State
from diptych.router.state import RouterState
from diptych.server.listening import HttpServer, http_server

QUICK = {"health_interval": 0.1, "health_timeout": 0.2, "breaker_pause": 0.3, "log_requests": False}


class Stream(Response):
    """Server-sent events with pauses; breaks the connection in the end if `dies`."""

    def __init__(self, events: list[bytes], *, dies: bool = False, pause_s: float = 0.01, on_gone: Any = None) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.events, self.dies, self.pause_s, self.on_gone = events, dies, pause_s, on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.ensure_future(receive())
        for body in self.events:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.wait({gone}, timeout=self.pause_s)
            if gone.done():
                if self.on_gone is not None:
                    self.on_gone()
                return
        gone.cancel()
        if not self.dies:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class ScriptedEngine:
    """Says of itself what it is told to, keeps what it is asked, and answers with `script(request, body)`."""

    def __init__(self, mode: str = "null", *, model: str = "fake", bootstrap_port: int | None = None) -> None:
        self.info = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": bootstrap_port}
        self.model = model
        self.num_waiting = 0
        self.health_status = 200
        self.is_frozen = False
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.script: Callable[[Request, dict[str, Any]], Awaitable[Response]] = self.answer
        self.url = ""
        self._stack = AsyncExitStack()

    async def answer(self, request: Request, body: dict[str, Any]) -> Response:
        if body.get("stream"):
            return Stream([b'data: {"n":%d}\n\n' % index for index in range(3)] + [b"data: [DONE]\n\n"])
        return JSONResponse({"from": self.url})

    async def start(self, port: int = 0) -> ScriptedEngine:
        self.url = await self._stack.enter_async_context(serving(self._app(), port))
        return self

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def _app(self) -> Starlette:
        async def any_path(request: Request) -> Response:
            if self.is_frozen:
                await asyncio.sleep(30)
            return await self._reply(request)

        return Starlette(routes=[Route("/{path:path}", any_path, methods=["GET", "POST", "PUT", "DELETE"])])

    async def _reply(self, request: Request) -> Response:
        path = request.url.path
        if path == "/health":
            return Response(status_code=self.health_status)
        if path == "/server_info":
            return JSONResponse(self.info)
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": [{"id": self.model}]})
        if path == "/v1/loads":
            return JSONResponse(
                {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": self.num_waiting}]}
            )
        text = await request.body()
        body = orjson.loads(text) if text else {}
        self.paths.append(path)
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        return await self.script(request, body)


@asynccontextmanager
async def serving(app: Starlette, port: int = 0) -> AsyncIterator[str]:
    """The application behind uvicorn; its address."""
    config = uvicorn.Config(app, lifespan="off", ws="none", log_level="critical", timeout_graceful_shutdown=0)
    server = HttpServer(config)
    with socket.create_server(("127.0.0.1", port)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            server.force_exit = True
            await task


class RunningRouter:
    """A router and a client of it."""

    def __init__(self, state: RouterState, http: httpx.AsyncClient) -> None:
        self.state = state
        self.http = http

    def states(self) -> dict[str, State]:
        return {member.url: member.state for member in self.state.pool}

    async def until(self, condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Every request is over, and no engine is thought to have one."""
        await self.until(lambda: self.state.num_open == 0)
        assert self.state.pool.num_active == 0
        assert [(member.num_active, member.pending_tokens) for member in self.state.pool if member.num_active] == []
        assert [member.url for member in self.state.pool if member.pending_tokens] == []

    async def joined(self) -> None:
        await self.until(lambda: all(state is State.HEALTHY for state in self.states().values()))


@asynccontextmanager
async def routing(
    *engines: ScriptedEngine, roles: tuple[Role | None, ...] = (), waits: bool = True, **settings: Any
) -> AsyncIterator[RunningRouter]:
    """A router over these engines, which have all joined. Args: settings: of RouterConfig."""
    given = roles or (None,) * len(engines)
    addresses = tuple(EngineAddress(url=engine.url, role=role) for engine, role in zip(engines, given, strict=True))
    config = RouterConfig(engines=addresses, **{**QUICK, **settings})
    async with RouterState(config) as state:
        server = http_server(create_app(state))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx.AsyncClient(base_url=url, timeout=10) as http:
                    router = RunningRouter(state, http)
                    if waits:
                        await router.joined()
                    yield router
                    await router.idle()
            finally:
                server.should_exit = True
                server.force_exit = True
                await task


@pytest.fixture
async def engine_of() -> AsyncIterator[Callable[..., Awaitable[ScriptedEngine]]]:
    """Starts engines that end with the test: `await engine_of("decode")`."""
    started: list[ScriptedEngine] = []

    async def start(mode: str = "null", **options: Any) -> ScriptedEngine:
        started.append(await ScriptedEngine(mode, **options).start())
        return started[-1]

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
def route_to() -> Callable[..., Any]:
    """Context manager for a router: `async with route_to(a, b, policy="random") as router`."""
    return routing


@pytest.fixture
def stream() -> type[Stream]:
    """The class of a scripted streaming answer."""
    return Stream
