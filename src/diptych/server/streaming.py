"""Ties a response to its client's connection: when the client goes, the work ends, whatever state it is in.

Knows nothing of generation; work is a coroutine or an async generator of bytes, ended by cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.errors import DiptychError
from diptych.server.errors import body_of, error_body, response_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_CLIENT_CLOSED_STATUS = 499  # never sent: nobody is there to read it


class ClientGone(Exception):
    """The client closed its connection; its work has been cancelled."""


def event(content: Any) -> bytes:
    """One server-sent event holding JSON."""
    return b"data: " + orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Result of `work`, which is cancelled when the client disconnects.

    The request's body must have been read. Raises: ClientGone, or what `work` raises.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        await _cancel(worker, watcher)


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Starlette handler for ClientGone: an empty answer that goes nowhere."""
    return Response(status_code=_CLIENT_CLOSED_STATUS)


class EventStream(Response):
    """Server-sent events from a generator of whole events.

    Nothing is sent before the first event exists, so that a request refused by then gets a proper status. A later error
    becomes an event, followed by [DONE].
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _cancel(pump, watcher)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events, b"")
            except DiptychError as error:
                await response_of(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except DiptychError as error:
                await send({"type": "http.response.body", "body": event(body_of(error)) + DONE, "more_body": True})
            except OSError:
                return  # the connection broke while we wrote
            except Exception:
                logger.exception("bug while streaming %s", scope["path"])
                body = error_body(500, "internal error; the server's log has details", code="internal_error")
                await send({"type": "http.response.body", "body": event(body) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its clean-up, so that the engine has been told before we go on."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    for task in running:
        with suppress(asyncio.CancelledError, Exception):
            await task
