"""Calls of functions in a model's text: finding them, streaming them, and forcing them.

`parser.py` holds the protocol and the stream every format shares, one file each the formats, `choice.py` what
`tool_choice` forces and how to read it back. Must not know of HTTP or of the engine.
"""

from __future__ import annotations

from diptych.server.tool_calls.choice import tool_choice_parser, tool_choice_schema
from diptych.server.tool_calls.deltas import ContentDelta, Delta, MakeId, ToolCall, ToolCallDelta, collect, new_call_id
from diptych.server.tool_calls.hermes import HermesFormat
from diptych.server.tool_calls.llama3 import Llama3Format
from diptych.server.tool_calls.mistral import MistralFormat
from diptych.server.tool_calls.parser import CallFormat, MarkedCallParser, ToolCallParser

__all__ = [
    "FORMATS",
    "CallFormat",
    "ContentDelta",
    "Delta",
    "MakeId",
    "MarkedCallParser",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "collect",
    "detect_parser",
    "make_parser",
    "new_call_id",
    "tool_choice_parser",
    "tool_choice_schema",
]

FORMATS: dict[str, type[CallFormat]] = {
    "hermes": HermesFormat,
    "llama3": Llama3Format,
    "mistral": MistralFormat,
}

# What a chat template contains, most telling first. XML arguments inside <tool_call> are formats we do not read.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "none"),
    ("<arg_key>", "none"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
)


def detect_parser(template: str | None) -> str:
    """Name of the format that a chat template asks the model for, or "none". None, the plain template: hermes."""
    if template is None:
        return "hermes"
    return next((name for sign, name in _SIGNS if sign in template), "none")


def make_parser(name: str, make_id: MakeId = new_call_id) -> ToolCallParser:
    """A parser for one response. Args: name: a key of FORMATS."""
    return MarkedCallParser(FORMATS[name](), make_id)
