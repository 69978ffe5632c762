"""API key check, as an ASGI middleware that touches neither streams nor disconnects."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.server.errors import error_body, json_response

_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/ping", "/metrics"})


class ApiKeyMiddleware:
    """Demands `Authorization: Bearer KEY` on everything but health and metrics."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"].rstrip("/") in _OPEN_PATHS
            or self._is_allowed(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
            return
        body = error_body(
            401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
        )
        await json_response(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._api_key)
