"""Listening sockets, and uvicorn as every server of this process runs it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.applications import Starlette

from diptych.errors import ConfigError

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than the usual proxy's, so that the proxy closes first
_CONNECTION_GRACE_S = 3  # for answers in flight, once their server is told to stop


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: who may stop when is decided by its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def http_server(app: Starlette) -> HttpServer:
    """The server of an application; `await server.serve(sockets=[listener])` runs it."""
    return HttpServer(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CONNECTION_GRACE_S,
        )
    )


def listen(host: str, port: int, *, flag: str) -> socket.socket:
    """A listening socket. Raises: ConfigError, naming `flag`, if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; stop what uses it, or choose another {flag}"
        ) from error
