"""Reads a request's body: bounded, as JSON whatever its content type says, validated into a schema."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from diptych.errors import RequestError
from diptych.server.errors import request_error_of
from diptych.server.streaming import ClientGone

Schema = TypeVar("Schema", bound=BaseModel)

_INLINE_NBYTES = 256 * 1024


async def read_body(request: Request, max_nbytes: int) -> bytes:
    """The whole body. Raises: HTTPException 413 as soon as it is known to be too large, ClientGone if it breaks off."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_nbytes:
        raise _too_large(max_nbytes)
    pieces: list[bytes] = []
    num_received = 0
    try:
        async for piece in request.stream():
            num_received += len(piece)
            if num_received > max_nbytes:
                raise _too_large(max_nbytes)
            pieces.append(piece)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(pieces)


async def read_schema(request: Request, schema: type[Schema], max_nbytes: int) -> Schema:
    """The body as `schema`. Raises: RequestError naming the first field that is wrong."""
    body = await read_body(request, max_nbytes)
    if len(body) <= _INLINE_NBYTES:
        return _parse(body, schema)
    return await asyncio.to_thread(_parse, body, schema)


def validated(schema: type[Schema], value: object, prefix: str = "") -> Schema:
    """`value` as `schema`. Raises: RequestError naming the first field that is wrong, after `prefix`."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise request_error_of(error, prefix) from None


def _parse(body: bytes, schema: type[Schema]) -> Schema:
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return validated(schema, value)


def _too_large(max_nbytes: int) -> HTTPException:
    return HTTPException(413, f"the body exceeds {max_nbytes} bytes (--max-body-size)", {"Connection": "close"})
