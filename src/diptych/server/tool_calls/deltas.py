"""What a tool call parser yields: content, calls, and the pieces of both. Knows no format."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

MakeId = Callable[[], str]

_ID_CHARACTERS = string.ascii_letters + string.digits
ID_LEN = 9
"""Mistral's chat templates refuse ids of any other length; the other formats do not care."""


def new_call_id() -> str:
    """A random id for a call, of nine letters and digits."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(ID_LEN))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: JSON text, as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call number `index`. call_id and name come with its first delta only; `arguments` concatenate."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ToolCallDelta


def collect(deltas: list[Delta]) -> tuple[str, list[ToolCall]]:
    """Content and calls that a stream of deltas adds up to."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    calls: list[ToolCall] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            continue
        if delta.call_id is not None and delta.name is not None:
            calls.append(ToolCall(delta.call_id, delta.name, delta.arguments))
        else:
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.call_id, call.name, call.arguments + delta.arguments)
    return content, calls


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as the model wrote it; an id is rare."""

    name: str
    arguments: str
    call_id: str | None = None


class _CallObject(msgspec.Struct):
    """The JSON object of a call in every format; other keys are ignored."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    id: str | int | None = None


_one = msgspec.json.Decoder(_CallObject)
_many = msgspec.json.Decoder(list[_CallObject])


def read_calls(text: str, *, needs_arguments: bool = False) -> list[WrittenCall] | None:
    """Calls in the JSON object, or array of objects, that `text` is; None if it is malformed or something else.

    needs_arguments: an object without arguments is something else (where nothing but its keys marks a call).
    """
    try:
        encoded = text.encode()
        found = _many.decode(encoded) if text.startswith("[") else [_one.decode(encoded)]
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    calls: list[WrittenCall] = []
    for call in found:
        raw = call.parameters if isinstance(call.arguments, msgspec.UnsetType) else call.arguments
        if isinstance(raw, msgspec.UnsetType) and needs_arguments:
            return None
        arguments = "{}" if isinstance(raw, msgspec.UnsetType) else read_arguments(bytes(raw).decode())
        if arguments is None or not call.name:
            return None
        calls.append(WrittenCall(call.name, arguments, None if call.id is None else str(call.id)))
    return calls or None


def read_arguments(text: str) -> str | None:
    """Arguments as the text of a JSON object; some models write null for none, or the object inside a string."""
    text = text.strip()
    if text.startswith('"'):
        try:
            text = str(msgspec.json.decode(text.encode())).strip()
        except (msgspec.DecodeError, UnicodeEncodeError):
            return None
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        return None
    try:
        msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return text
