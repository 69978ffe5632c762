"""The table of routes: path, methods, handler and body. The application and its OpenAPI document are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from diptych.server import operations
from diptych.server.chat_completions import chat
from diptych.server.completions import complete
from diptych.server.native import generate
from diptych.server.schemas import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    RoleSwitch,
    TokenizeRequest,
)
from diptych.server.state import ServerState

Handler = Callable[[ServerState, Request], Awaitable[Response]]


@dataclass(frozen=True)
class RouteSpec:
    """One path. `body` is the schema of what it takes, `is_stream` whether it can answer with server-sent events."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    body: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    media_type: str | None = "application/json"
    is_stream: bool = False


def _get(
    path: str, handler: Handler, *, query: tuple[str, ...] = (), media_type: str | None = "application/json"
) -> RouteSpec:
    return RouteSpec(path, ("GET",), handler, query=query, media_type=media_type)


def _post(
    path: str, handler: Handler, body: type[BaseModel], *, media_type: str | None = "application/json"
) -> RouteSpec:
    return RouteSpec(path, ("POST",), handler, body, media_type=media_type)


ROUTES: tuple[RouteSpec, ...] = (
    _get("/health", operations.health, media_type=None),
    _get("/ready", operations.health, media_type=None),
    RouteSpec("/ping", ("GET", "POST"), operations.health, media_type=None),
    _get("/health_generate", operations.health_generate, media_type=None),
    _get("/v1/models", operations.models),
    _get("/v1/models/{model_id:path}", operations.model),
    RouteSpec("/v1/chat/completions", ("POST",), chat, ChatRequest, is_stream=True),
    RouteSpec("/v1/completions", ("POST",), complete, CompletionRequest, is_stream=True),
    RouteSpec("/generate", ("POST", "PUT"), generate, GenerateRequest, is_stream=True),
    _get("/model_info", operations.model_info),
    _get("/get_model_info", operations.model_info),
    _get("/server_info", operations.server_info),
    _get("/get_server_info", operations.server_info),
    _get("/v1/loads", operations.loads, query=("include",)),
    _get("/get_load", operations.get_load),
    _get("/load", operations.server_load),
    _get("/version", operations.version),
    _post("/abort_request", operations.abort_request, AbortRequest, media_type=None),
    RouteSpec("/flush_cache", ("GET", "POST"), operations.flush_cache, query=("timeout",), media_type="text/plain"),
    _post("/pd_role_switch", operations.switch_role, RoleSwitch),
    _post("/tokenize", operations.tokenize, TokenizeRequest),
    _post("/v1/tokenize", operations.tokenize, TokenizeRequest),
    _post("/detokenize", operations.detokenize, DetokenizeRequest),
    _post("/v1/detokenize", operations.detokenize, DetokenizeRequest),
    _get("/tokenizer_info", operations.tokenizer_info),
    _get("/metrics", operations.metrics, media_type="text/plain"),
)
