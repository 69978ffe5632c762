"""Which headers pass the router in either direction, and the identity that a request carries through all processes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "content-length", "expect", "x-request-id", "traceparent"}
_NOT_RETURNED = frozenset(name.encode() for name in (*_HOP_BY_HOP, "date", "server", "x-request-id"))
# What a client says here would override the pair that the router chose.
_OVERRIDES = "x-override-"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
MAX_REQUEST_ID_LEN = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """One request's names. request_id: X-Request-ID. traceparent: of the W3C."""

    request_id: str
    traceparent: str

    @property
    def trace_id(self) -> str:
        """The part of the traceparent that all processes share."""
        return self.traceparent.split("-")[1]


def identity_of(request_id: str, traceparent: str) -> Identity:
    """What the client sent, where it is valid; else new ones, which belong together."""
    fresh = uuid.uuid4().hex
    is_valid = 0 < len(request_id) <= MAX_REQUEST_ID_LEN and request_id.isascii() and request_id.isprintable()
    if not _TRACEPARENT.fullmatch(traceparent):
        traceparent = f"00-{fresh}-{uuid.uuid4().hex[:16]}-01"
    return Identity(request_id if is_valid else fresh, traceparent)


def forwarded(headers: Iterable[tuple[str, str]], identity: Identity, engine_key: str | None) -> list[tuple[str, str]]:
    """Headers for an engine.

    Args: headers: the client's, with names in lower case. engine_key: replaces the client's bearer token, if not None.
    """
    pairs = list(headers)
    named = {token.strip().lower() for name, value in pairs if name == "connection" for token in value.split(",")}
    dropped = _NOT_FORWARDED | named
    kept = [(name, value) for name, value in pairs if name not in dropped and not name.startswith(_OVERRIDES)]
    if engine_key is not None:
        kept = [(name, value) for name, value in kept if name != "authorization"]
        kept.append(("authorization", f"Bearer {engine_key}"))
    return [*kept, ("x-request-id", identity.request_id), ("traceparent", identity.traceparent)]


def returned(headers: Iterable[tuple[bytes, bytes]], identity: Identity) -> list[tuple[bytes, bytes]]:
    """Headers for the client, from an engine's, whose names are in lower case."""
    kept = [(name, value) for name, value in headers if name not in _NOT_RETURNED]
    return [*kept, (b"x-request-id", identity.request_id.encode())]
