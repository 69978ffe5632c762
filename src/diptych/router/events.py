"""Cuts a stream of server-sent events into whole ones, so that a dying engine never leaves half an event behind.

Looks at the ends of chunks only; what is in an event is nobody's business here.
"""

from __future__ import annotations

MAX_HELD_NBYTES = 1 << 20
_ENDS = (b"\n\n", b"\r\n\r\n")
_LAST = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n")


def split_events(held: bytes, chunk: bytes) -> tuple[bytes, bytes]:
    """Whole events of `held + chunk`, and the beginning of the next. One beyond a mebibyte comes in parts."""
    data = held + chunk if held else chunk
    if data.endswith(_ENDS):
        return data, b""
    end = max((at + len(mark) for mark in _ENDS if (at := data.rfind(mark)) >= 0), default=0)
    if len(data) - end > MAX_HELD_NBYTES:
        return data, b""
    return data[:end], data[end:]


def is_last(events: bytes) -> bool:
    """Whether these events end a stream."""
    return events.endswith(_LAST)
