"""HTTP to the engines, and the one place that knows its client library. Errors come out as `EngineFailed`.

Answers are not decompressed, redirected or retried here: what an engine sends is what a caller sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from diptych.router.config import RouterConfig

# Below every server's own, or a request could meet a connection that is just being closed.
_KEEP_ALIVE_S = 3.0
_READ_NBYTES = 1 << 18
_MAX_HEADER_NBYTES = 1 << 16
_OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

Headers = list[tuple[str, str]]


class EngineFailed(Exception):
    """There is no connection, it broke, or no answer came in time; the text says which.

    was_connected: whether the engine may have begun to work on it.
    """

    def __init__(self, text: str, *, was_connected: bool = True) -> None:
        super().__init__(text)
        self.was_connected = was_connected


class ErrorStatus(Exception):
    """The engine answered a question of ours with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:200]}")
        self.status = status
        self.text = text


@dataclass(frozen=True)
class Answer:
    """The beginning of an engine's answer; the rest is read from it piece by piece."""

    status: int
    headers: list[tuple[bytes, bytes]]
    _response: aiohttp.ClientResponse

    def header(self, name: bytes) -> bytes:
        """Value of a header given in lower case; empty if it is not there."""
        return next((value for key, value in self.headers if key == name), b"")

    async def read(self) -> bytes:
        """What has arrived of the body, at least a byte; nothing at its end. Raises: EngineFailed."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(_text(error)) from error

    async def read_up_to(self, max_nbytes: int) -> bytes:
        """The whole body, cut off after about `max_nbytes`. Raises: EngineFailed."""
        pieces: list[bytes] = []
        num_read = 0
        while num_read < max_nbytes and (piece := await self.read()):
            pieces.append(piece)
            num_read += len(piece)
        return b"".join(pieces)


class Upstream:
    """Connections to all engines. An async context manager."""

    def __init__(self, config: RouterConfig) -> None:
        key = config.engine_api_key or config.api_key
        self._own_headers: Headers = [] if key is None else [("Authorization", f"Bearer {key}")]
        self._connect_timeout_s = config.connect_timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, use_dns_cache=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_NBYTES,
            max_line_size=_MAX_HEADER_NBYTES,
            max_field_size=_MAX_HEADER_NBYTES,
            skip_auto_headers=_OWN_HEADERS,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> AsyncIterator[Answer]:
        """An engine's answer, from its headers on. Leaving before its end closes the connection.

        Raises: EngineFailed if no answer begins.
        """
        session = self._open_session
        try:
            response = await session.request(method, url, data=body, headers=list(headers), allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineFailed(_text(error), was_connected=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(_text(error)) from error
        try:
            yield Answer(response.status, [(name.lower(), value) for name, value in response.raw_headers], response)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def ask(
        self, method: str, url: str, *, timeout_s: float, max_nbytes: int = 1 << 24, body: bytes | None = None
    ) -> bytes:
        """The body of an engine's answer to a question of the router's own.

        Args: body: JSON. Raises: EngineFailed, ErrorStatus for any status but 2xx.
        """
        headers = [*self._own_headers, *([] if body is None else [("Content-Type", "application/json")])]
        try:
            async with asyncio.timeout(timeout_s), self.request(method, url, headers=headers, body=body) as answer:
                text = await answer.read_up_to(max_nbytes)
        except TimeoutError:
            raise EngineFailed(f"no answer within {timeout_s:g} s") from None
        if not 200 <= answer.status < 300:
            raise ErrorStatus(answer.status, text.decode(errors="replace"))
        return text

    async def ask_json(self, url: str, *, timeout_s: float) -> Any:
        """GET `url` as JSON. Raises: EngineFailed, also if it is none; ErrorStatus."""
        try:
            return orjson.loads(await self.ask("GET", url, timeout_s=timeout_s))
        except orjson.JSONDecodeError as error:
            raise EngineFailed(f"{url} answered with something that is not JSON") from error

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise AssertionError("Upstream is used outside its context")
        return self._session


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
