"""/workers: the engines of the pool, seen and changed while the router runs."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from diptych.errors import ConfigError, RequestError
from diptych.router.config import Role, engine_address
from diptych.router.member import Member
from diptych.router.state import RouterState
from diptych.server.bodies import read_body
from diptych.server.errors import json_response

_ROLES = {"": None, "regular": Role.UNIFIED, **{role.value: role for role in Role}}


async def list_workers(state: RouterState, request: Request) -> Response:
    """GET /workers."""
    return json_response({"workers": [description(member) for member in state.pool]})


async def add_worker(state: RouterState, request: Request) -> Response:
    """POST /workers {url, role, bootstrap_port}: role and port may be left out, then the engine is asked."""
    fields = await _fields(state, request)
    role, port = fields.get("role") or "", fields.get("bootstrap_port")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"role must be one of {', '.join(Role)}, got {role!r}", param="role")
    if port is not None and (not isinstance(port, int) or isinstance(port, bool)):
        raise RequestError(f"bootstrap_port must be a number, got {port!r}", param="bootstrap_port")
    try:
        address = engine_address(_url(fields), _ROLES[role], port)
    except ConfigError as error:
        raise RequestError(str(error), param="url") from None
    return json_response(description(state.pool.add(address)), 202)


async def remove_worker(state: RouterState, request: Request) -> Response:
    """DELETE /workers {url}, or ?url=: gets no more requests from now on; those that it has go on."""
    url = request.query_params.get("url") or _url(await _fields(state, request))
    try:
        address = engine_address(url)
    except ConfigError as error:
        raise RequestError(str(error), param="url") from None
    return json_response(description(state.pool.remove(address.url)))


def description(member: Member) -> dict[str, Any]:
    """One engine for an operator."""
    return {
        "url": member.url,
        "role": member.role,
        "state": member.state,
        "bootstrap_port": member.bootstrap_port if member.role is Role.PREFILL else None,
        "models": sorted(member.models),
        "active": member.num_active,
        "load": member.load,
        "last_error": member.last_error,
    }


def _url(fields: dict[str, Any]) -> str:
    url = fields.get("url")
    if not isinstance(url, str) or not url:
        raise RequestError('url must name an engine, such as "http://127.0.0.1:30000"', param="url")
    return url


async def _fields(state: RouterState, request: Request) -> dict[str, Any]:
    """The body. Only as application/json, which a foreign web page cannot send to this machine without being asked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send the body as Content-Type: application/json")
    try:
        value = orjson.loads(await read_body(request, state.config.max_body_nbytes))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value
