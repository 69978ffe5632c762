"""The routes that replace weights, release memory and pause: SGLang's names, and vLLM's for sleep and pause.

Administrative like loading an adapter: whoever may send requests may send these, so an API key guards both.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diptych.core.calls import JoinWeightsGroup, TensorBytes
from diptych.core.messages import InFlight
from diptych.errors import DiptychError, RequestError
from diptych.models.safetensors_bytes import tensors_of_safetensors
from diptych.server.bodies import read_body, read_schema, validated
from diptych.server.errors import body_of, json_response
from diptych.server.state import ServerState
from diptych.server.upkeep import EngineUpkeep, float_values, new_update_id
from diptych.server.upkeep_schemas import (
    DestroyGroupRequest,
    DiskUpdate,
    DistributedUpdate,
    InitGroupRequest,
    MemoryRequest,
    PauseRequest,
    TensorUpdate,
    UpdateFields,
    VersionRequest,
    WeightsByName,
)

MAX_TENSORS_NBYTES = 2 * 1024 * 1024 * 1024
MAX_VALUES = 1_000_000
_RAW = "application/octet-stream"


def _upkeep(state: ServerState, request: Request) -> EngineUpkeep:
    """Raises: RequestError for a request that a foreign page has a browser send; Unavailable without an engine."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise RequestError("this route does not answer pages of other sites")
    return EngineUpkeep(state.service.client)


async def update_from_disk(state: ServerState, request: Request) -> Response:
    """POST /update_weights_from_disk {model_path, load_format, weight_version, abort_all_requests, in_flight}."""
    body = await read_schema(request, DiskUpdate, state.max_body_nbytes)
    upkeep = _upkeep(state, request)
    try:
        num_open = await upkeep.update_from_disk(
            body.model_path, body.load_format, in_flight=_in_flight(body), weight_version=body.weight_version
        )
    except DiptychError as error:
        return _failed(error)
    return _done(num_open)


async def update_from_tensor(state: ServerState, request: Request) -> Response:
    """POST /update_weights_from_tensor: safetensors bytes, as the body or base64 in `serialized_named_tensors`.

    With `is_last` false they are kept under `update_id` until a later request completes the update.
    """
    is_raw = request.headers.get("content-type", "").partition(";")[0].strip().lower() == _RAW
    if is_raw:
        fields = validated(TensorUpdate, dict(request.query_params))
        parts = [await read_body(request, MAX_TENSORS_NBYTES)]
    else:
        fields = await read_schema(request, TensorUpdate, MAX_TENSORS_NBYTES)
        parts = [_decoded(text) for text in fields.serialized_named_tensors]
    upkeep = _upkeep(state, request)
    update_id = fields.update_id or new_update_id()
    try:
        if parts or not fields.update_id:
            await upkeep.stage(update_id, await asyncio.to_thread(_tensors, parts))
        num_open = await upkeep.commit(update_id, _in_flight(fields), fields.weight_version) if fields.is_last else 0
    except DiptychError as error:
        return _failed(error)
    return _done(num_open, update_id=update_id)


def _tensors(parts: list[bytes]) -> list[TensorBytes]:
    return [tensor for part in parts for tensor in tensors_of_safetensors(part)]


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RequestError(f"this is not base64: {error}", param="serialized_named_tensors") from None


async def update_from_distributed(state: ServerState, request: Request) -> Response:
    """POST /update_weights_from_distributed {names, dtypes, shapes, group_name}: the trainer broadcasts them now."""
    body = await read_schema(request, DistributedUpdate, state.max_body_nbytes)
    upkeep, update_id = _upkeep(state, request), new_update_id()
    try:
        await upkeep.receive(
            update_id,
            body.group_name,
            names=body.names,
            dtypes=[dtype.removeprefix("torch.") for dtype in body.dtypes],
            shapes=[tuple(shape) for shape in body.shapes],
        )
        num_open = await upkeep.commit(update_id, _in_flight(body), body.weight_version)
    except DiptychError as error:
        return _failed(error)
    return _done(num_open)


async def init_group(state: ServerState, request: Request) -> Response:
    """POST /init_weights_update_group: answered once the trainer, who is rank 0, has met all ranks."""
    body = await read_schema(request, InitGroupRequest, state.max_body_nbytes)
    call = JoinWeightsGroup(
        group=body.group_name,
        address=body.master_address,
        port=body.master_port,
        rank_offset=body.rank_offset,
        world_size=body.world_size,
        backend=body.backend,
        timeout_s=body.timeout,
    )
    try:
        await _upkeep(state, request).join_group(call)
    except DiptychError as error:
        return _failed(error)
    return _done(0, message=f"group {body.group_name!r} is there")


async def destroy_group(state: ServerState, request: Request) -> Response:
    """POST /destroy_weights_update_group {group_name}."""
    body = await read_schema(request, DestroyGroupRequest, state.max_body_nbytes)
    try:
        await _upkeep(state, request).leave_group(body.group_name)
    except DiptychError as error:
        return _failed(error)
    return _done(0, message=f"group {body.group_name!r} is gone")


async def update_version(state: ServerState, request: Request) -> Response:
    """POST /update_weight_version {new_version}."""
    body = await read_schema(request, VersionRequest, state.max_body_nbytes)
    await _upkeep(state, request).set_version(body.new_version)
    return json_response({"success": True, "message": "", "new_version": body.new_version})


async def get_weights(state: ServerState, request: Request) -> Response:
    """POST /get_weights_by_name {name, truncate_size}: the first rows of a tensor, as numbers."""
    body = await read_schema(request, WeightsByName, state.max_body_nbytes)
    (tensor,) = await _upkeep(state, request).read([body.name], body.truncate_size)
    values = float_values(tensor)
    if values.size > MAX_VALUES:
        raise RequestError(
            f"{body.truncate_size} rows are {values.size} values, at most {MAX_VALUES} are sent", param="truncate_size"
        )
    return json_response(values.tolist())


async def pause(state: ServerState, request: Request) -> Response:
    """POST /pause_generation {mode}, /pause?mode=: requests in flight are aborted, finished, kept or retracted."""
    body = await _fields(state, request, PauseRequest)
    await _upkeep(state, request).pause("keep" if body.mode == "in_place" else body.mode)
    return json_response({"status": "ok", "message": f"generation is paused ({body.mode})"})


async def resume_generation(state: ServerState, request: Request) -> Response:
    """POST /continue_generation, /resume."""
    await _upkeep(state, request).resume_generation()
    return json_response({"status": "ok", "message": "generation goes on"})


async def is_paused(state: ServerState, request: Request) -> Response:
    """GET /is_paused."""
    return json_response({"is_paused": state.ready_info.is_paused})


async def release(state: ServerState, request: Request) -> Response:
    """POST /release_memory_occupation {tags}; without tags everything is released."""
    body = await _fields(state, request, MemoryRequest)
    message = await _upkeep(state, request).release(body.tags, body.in_flight or "wait")
    return json_response({"success": True, "message": message})


async def resume(state: ServerState, request: Request) -> Response:
    """POST /resume_memory_occupation {tags}, /wake_up?tags=; without tags everything is resumed."""
    body = await _fields(state, request, MemoryRequest)
    message = await _upkeep(state, request).resume(body.tags)
    return json_response({"success": True, "message": message})


async def sleep(state: ServerState, request: Request) -> Response:
    """POST /sleep?level=1&mode=abort: level 1 releases the KV cache, level 2 the weights as well."""
    body = await _fields(state, request, MemoryRequest)
    tags = body.tags if body.level == 2 else ["kv_cache"]
    message = await _upkeep(state, request).release(tags, body.in_flight or "abort")
    return json_response({"success": True, "message": message})


async def is_sleeping(state: ServerState, request: Request) -> Response:
    """GET /is_sleeping."""
    released = state.ready_info.released
    return json_response({"is_sleeping": bool(released), "released": list(released)})


async def _fields(state: ServerState, request: Request, schema: Any) -> Any:
    """A body, if there is one, over the query's parameters."""
    query: dict[str, Any] = dict(request.query_params)
    if tags := request.query_params.getlist("tags"):
        query["tags"] = tags
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return validated(schema, query)
    given = await read_schema(request, schema, state.max_body_nbytes)
    return validated(schema, query | given.model_dump(exclude_unset=True))


def _in_flight(body: UpdateFields) -> InFlight:
    return "abort" if body.abort_all_requests else body.in_flight


def _done(num_open: int, *, message: str = "weights are replaced", **fields: Any) -> Response:
    return json_response({"success": True, "message": message, "num_paused_requests": num_open, **fields})


def _failed(error: DiptychError) -> Response:
    """SGLang's form of an answer, with the error in OpenAI's form besides."""
    fields = {"success": False, "message": str(error), "num_paused_requests": 0}
    return json_response(fields | body_of(error), error.status)
