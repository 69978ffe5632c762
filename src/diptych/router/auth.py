"""Who may ask the router what: clients by the API key, operators by the admin key. An ASGI middleware."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.router.config import RouterConfig
from diptych.server.errors import error_body, json_response

_OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})
ADMIN_PATH = "/workers"


class RouterAuth:
    """Demands a bearer token: on /workers the admin key, elsewhere the API key, where one is set.

    Without any key, /workers is served on loopback only: whoever may name engines sees every prompt.
    """

    def __init__(self, app: ASGIApp, config: RouterConfig) -> None:
        self._app = app
        self._api_key = config.api_key
        self._admin_key = config.admin_api_key or config.api_key
        self._is_loopback = config.is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").rstrip("/")
        if scope["type"] != "http" or path in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        is_admin = path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/")
        key = self._admin_key if is_admin else self._api_key
        if is_admin and key is None and not self._is_loopback:
            text = "/workers needs a key beyond loopback: start the router with --admin-api-key or --api-key"
            await json_response(error_body(403, text, code="admin_key_required"), 403)(scope, receive, send)
        elif key is None or _has_token(Headers(scope=scope), key):
            await self._app(scope, receive, send)
        else:
            name = "admin" if is_admin and self._admin_key != self._api_key else "API"
            text = f"the {name} key is missing or wrong; send Authorization: Bearer KEY"
            body = error_body(401, text, code="invalid_api_key")
            await json_response(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


def _has_token(headers: Headers, key: str) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), key.encode())
