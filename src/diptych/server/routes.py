"""The table of routes: path, methods, handler and body. The application and its OpenAPI document are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from diptych.server import operations, upkeep_routes
from diptych.server.adapter_routes import load_adapter, unload_adapter
from diptych.server.chat_completions import chat
from diptych.server.completions import complete
from diptych.server.native import generate
from diptych.server.schemas import (
    AbortRequest,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    LoadAdapterRequest,
    RoleSwitch,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from diptych.server.state import ServerState
from diptych.server.upkeep_schemas import (
    DestroyGroupRequest,
    DiskUpdate,
    DistributedUpdate,
    InitGroupRequest,
    MemoryRequest,
    PauseRequest,
    TensorUpdate,
    VersionRequest,
    WeightsByName,
)

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
    RouteSpec("/ping", ("GET", "POST"), operations.ping, media_type=None),
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
    _post("/load_lora_adapter", load_adapter, LoadAdapterRequest),
    _post("/v1/load_lora_adapter", load_adapter, LoadAdapterRequest),
    _post("/unload_lora_adapter", unload_adapter, UnloadAdapterRequest),
    _post("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest),
    _post("/update_weights_from_disk", upkeep_routes.update_from_disk, DiskUpdate),
    _post("/update_weights_from_tensor", upkeep_routes.update_from_tensor, TensorUpdate),
    _post("/update_weights_from_distributed", upkeep_routes.update_from_distributed, DistributedUpdate),
    _post("/init_weights_update_group", upkeep_routes.init_group, InitGroupRequest),
    _post("/destroy_weights_update_group", upkeep_routes.destroy_group, DestroyGroupRequest),
    _post("/update_weight_version", upkeep_routes.update_version, VersionRequest),
    _post("/get_weights_by_name", upkeep_routes.get_weights, WeightsByName),
    _post("/pause_generation", upkeep_routes.pause, PauseRequest),
    _post("/continue_generation", upkeep_routes.resume_generation, Body),
    _post("/pause", upkeep_routes.pause, PauseRequest),
    _post("/resume", upkeep_routes.resume_generation, Body),
    _get("/is_paused", upkeep_routes.is_paused),
    _post("/release_memory_occupation", upkeep_routes.release, MemoryRequest),
    _post("/resume_memory_occupation", upkeep_routes.resume, MemoryRequest),
    _post("/sleep", upkeep_routes.sleep, MemoryRequest),
    _post("/wake_up", upkeep_routes.resume, MemoryRequest),
    _get("/is_sleeping", upkeep_routes.is_sleeping),
    _post("/pd_role_switch", operations.switch_role, RoleSwitch),
    _post("/tokenize", operations.tokenize, TokenizeRequest),
    _post("/v1/tokenize", operations.tokenize, TokenizeRequest),
    _post("/detokenize", operations.detokenize, DetokenizeRequest),
    _post("/v1/detokenize", operations.detokenize, DetokenizeRequest),
    _get("/tokenizer_info", operations.tokenizer_info),
    _get("/metrics", operations.metrics, media_type="text/plain"),
)
