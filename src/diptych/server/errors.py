"""How every error reaches an HTTP client: one table, one body, `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from diptych.errors import DiptychError, Overloaded, RequestError, Unavailable

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    503: "service_unavailable",
    504: "timeout",
}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON body for an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; numbers that JSON lacks become null."""
    body = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers, media_type="application/json")


def body_of(error: DiptychError) -> dict[str, Any]:
    """The JSON body that reports `error`."""
    param = error.param if isinstance(error, RequestError) else None
    return error_body(error.status, str(error), param, error.code)


def response_of(error: DiptychError) -> Response:
    """The whole response that reports `error`, with Retry-After where coming back makes sense."""
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(error.retry_after_s)
    elif isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    return json_response(body_of(error), error.status, headers)


def request_error_of(error: ValidationError, prefix: str = "") -> RequestError:
    """The first thing pydantic found wrong, as a sentence about one field, whose name follows `prefix`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = prefix + ".".join(str(step) for step in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{param}: {text}" if param else text, param=param or None)


async def on_diptych_error(request: Request, error: Exception) -> Response:
    """Starlette handler for our own errors."""
    if not isinstance(error, DiptychError):
        raise error
    if error.status >= 500 and not isinstance(error, Overloaded | Unavailable):
        logger.error("%s %s failed: %s", request.method, request.url.path, error)
    return response_of(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler for unknown routes, wrong methods and the like."""
    if not isinstance(error, HTTPException):
        raise error
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    message = f"{error.detail}: {request.method} {request.url.path}"
    return json_response(
        error_body(error.status_code, message, code=code), error.status_code, dict(error.headers or {})
    )


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    """Starlette handler for bugs: the client learns that it was one, the log gets the traceback."""
    logger.error("bug while serving %s %s", request.method, request.url.path, exc_info=error)
    return json_response(error_body(500, "internal error; the server's log has details", code="internal_error"), 500)
