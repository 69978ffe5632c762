"""The routes that load and unload adapters, in SGLang's and vLLM's forms, and how adapters stand in /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diptych.core.messages import AdapterInfo
from diptych.errors import RequestError, Unsupported
from diptych.server.adapters import ServedAdapters
from diptych.server.bodies import read_schema
from diptych.server.errors import body_of, json_response
from diptych.server.schemas import LoadAdapterRequest, UnloadAdapterRequest
from diptych.server.state import ServerState


def adapter_card(state: ServerState, info: AdapterInfo) -> dict[str, Any]:
    """An adapter as an entry of /v1/models."""
    return {
        "id": info.name,
        "object": "model",
        "created": state.created,
        "owned_by": "diptych",
        "root": info.path,
        "parent": state.model_name,
        "max_model_len": state.ready_info.max_model_len,
    }


async def load_adapter(state: ServerState, request: Request) -> Response:
    """POST /load_lora_adapter {lora_name, lora_path, pinned}."""
    body = await read_schema(request, LoadAdapterRequest, state.max_body_nbytes)
    adapters = state.service.adapters
    if body.load_inplace:
        raise Unsupported("load_inplace is not served: unload the adapter, then load the other", param="load_inplace")
    try:
        await adapters.load(body.lora_name, body.lora_path, pinned=body.pinned)
    except RequestError as error:
        return _answer(adapters, error)
    return _answer(adapters, None)


async def unload_adapter(state: ServerState, request: Request) -> Response:
    """POST /unload_lora_adapter {lora_name}: answered once its running requests have ended."""
    body = await read_schema(request, UnloadAdapterRequest, state.max_body_nbytes)
    adapters = state.service.adapters
    try:
        await adapters.unload(body.lora_name)
    except RequestError as error:
        return _answer(adapters, error)
    return _answer(adapters, None)


def _answer(adapters: ServedAdapters, error: RequestError | None) -> Response:
    """SGLang's form of an answer, with an error in OpenAI's form besides."""
    fields: dict[str, Any] = {
        "success": error is None,
        "error_message": "" if error is None else str(error),
        "loaded_adapters": {info.name: info.path for info in adapters.loaded},
    }
    if error is None:
        return json_response(fields)
    return json_response(fields | body_of(error), error.status)
