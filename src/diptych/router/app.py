"""The router's ASGI application: the table of its routes, and what each does with a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import diptych
from diptych.errors import DiptychError
from diptych.router import adapters, fanout, workers
from diptych.router.auth import RouterAuth
from diptych.router.headers import identity_of
from diptych.router.prompt import Prompt, read_prompt
from diptych.router.relay import Call, Relay
from diptych.router.state import RouterState
from diptych.server.bodies import read_body
from diptych.server.errors import json_response, on_diptych_error, on_http_error, on_unexpected_error
from diptych.server.streaming import ClientGone, on_client_gone

Handler = Callable[[RouterState, Request], Awaitable[Response]]

_INLINE_NBYTES = 256 * 1024
# Routes whose prompt may be computed by another engine.
GENERATING = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages")
# Routes that any engine answers for all.
ANY_ENGINE = (
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/tokenizer_info",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/messages/count_tokens",
)


async def generate(state: RouterState, request: Request) -> Response:
    """Every generating route."""
    return await _relay(state, request, is_paired=True)


async def ask_any(state: RouterState, request: Request) -> Response:
    """A question that any engine can answer."""
    return await _relay(state, request, is_paired=False)


async def _relay(state: RouterState, request: Request, *, is_paired: bool) -> Response:
    state.admit()
    body = await read_body(request, state.config.max_body_nbytes)
    arrived_at = asyncio.get_running_loop().time()
    prompt = await _prompt(body) if is_paired else Prompt(body, "", 0, [])
    query = request.url.query
    call = Call(
        method=request.method,
        path=request.url.path + (f"?{query}" if query else ""),
        headers=request.headers.items(),
        identity=identity_of(request.headers.get("x-request-id", ""), request.headers.get("traceparent", "")),
        prompt=prompt,
        is_paired=is_paired,
        arrived_at=arrived_at,
    )
    return Relay(state, call)


async def _prompt(body: bytes) -> Prompt:
    if len(body) <= _INLINE_NBYTES:
        return read_prompt(body)
    return await asyncio.to_thread(read_prompt, body)


async def health(state: RouterState, request: Request) -> Response:
    """GET /health, /ping: 200 if requests can be answered, else 503; no body."""
    return _status(state.pool.is_serving and not state.is_draining)


async def ready(state: RouterState, request: Request) -> Response:
    """GET /ready: 200 if requests can go their designed way: a unified engine, or prefill and decode."""
    return _status(state.pool.has_pair and not state.is_draining)


def _status(is_good: bool) -> Response:
    return Response(status_code=200) if is_good else Response(status_code=503, headers={"Retry-After": "1"})


async def metrics(state: RouterState, request: Request) -> Response:
    """GET /metrics: of the router; each engine has its own."""
    body, content_type = state.metrics.render()
    return Response(body, media_type=content_type)


async def version(state: RouterState, request: Request) -> Response:
    """GET /version."""
    return json_response({"version": diptych.__version__})


ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    *((path, ("POST", "PUT") if path == "/generate" else ("POST",), generate) for path in GENERATING),
    *((path, ("GET", "POST"), ask_any) for path in ANY_ENGINE),
    ("/health", ("GET",), health),
    ("/ping", ("GET", "POST"), health),
    ("/ready", ("GET",), ready),
    ("/metrics", ("GET",), metrics),
    ("/version", ("GET",), version),
    ("/v1/models", ("GET",), fanout.models),
    ("/v1/models/{model_id:path}", ("GET",), fanout.model),
    ("/v1/loads", ("GET",), fanout.loads),
    ("/get_load", ("GET",), fanout.get_loads),
    ("/get_loads", ("GET",), fanout.get_loads),
    ("/flush_cache", ("GET", "POST"), fanout.flush_cache),
    ("/abort_request", ("POST",), fanout.abort_request),
    ("/load_lora_adapter", ("POST",), adapters.load_adapter),
    ("/v1/load_lora_adapter", ("POST",), adapters.load_adapter),
    ("/unload_lora_adapter", ("POST",), adapters.unload_adapter),
    ("/v1/unload_lora_adapter", ("POST",), adapters.unload_adapter),
    ("/workers", ("GET",), workers.list_workers),
    ("/workers", ("POST",), workers.add_worker),
    ("/workers", ("DELETE",), workers.remove_worker),
)


def create_app(state: RouterState) -> Starlette:
    """The ASGI application over `state`, which its owner opens and closes."""
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        DiptychError: on_diptych_error,
        HTTPException: on_http_error,
        ClientGone: on_client_gone,
        Exception: on_unexpected_error,
    }
    routes = [Route(path, _endpoint(state, handler), methods=list(methods)) for path, methods, handler in ROUTES]
    app = Starlette(
        routes=routes, exception_handlers=handlers, middleware=[Middleware(partial(RouterAuth, config=state.config))]
    )
    app.router.redirect_slashes = False
    return app


def _endpoint(state: RouterState, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(state, request)

    return endpoint
