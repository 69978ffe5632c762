"""What `tool_choice` forces: a grammar for the text, and a parser that reads the constrained text back.

A named function: the text is its arguments. "required": an array of {"name": ..., "parameters": ...}. Arguments stream
as they are written, since the grammar vouches for them; an output cut short keeps the arguments it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from diptych.core.request import Grammar, GrammarKind
from diptych.errors import RequestError
from diptych.server.markup import JsonScanner, skip_space
from diptych.server.tool_calls.deltas import ContentDelta, Delta, MakeId, ToolCall, ToolCallDelta, collect, new_call_id
from diptych.server.tool_calls.parser import ToolCallParser

Json = Mapping[str, object]

_DEFINITION_KEYS = ("$defs", "definitions")
_HEAD_KEYS = ("arguments", "parameters")


def tool_choice_schema(tools: Sequence[Json], choice: object, *, parallel: bool = True) -> Grammar | None:
    """The constraint that `tool_choice` puts on the text; None if it forces nothing.

    Args: tools: OpenAI's `tools`. choice: OpenAI's `tool_choice`. parallel: whether "required" may yield many calls.
    Raises: RequestError for a choice that names no such function, or tools that are none.
    """
    if not _forces_call(choice):
        return None
    functions = _functions(tools)
    name = _chosen_name(choice, functions)
    try:
        schema = _parameters(functions[name]) if name is not None else _any_call_schema(functions, parallel)
        text = msgspec.json.encode(schema).decode()
    except (RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"tools hold a schema that cannot be used: {error}", param="tools") from error
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def tool_choice_parser(tools: Sequence[Json], choice: object, make_id: MakeId = new_call_id) -> ToolCallParser | None:
    """The parser for text under `tool_choice_schema`'s constraint; None if it forces nothing."""
    if not _forces_call(choice):
        return None
    name = _chosen_name(choice, _functions(tools))
    return ForcedCallParser(make_id) if name is None else NamedCallParser(name, make_id)


def _forces_call(choice: object) -> bool:
    return choice not in (None, "none", "auto")


def _functions(tools: Sequence[Json]) -> dict[str, Json]:
    functions: dict[str, Json] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(f"tools[{index}] has no function with a name", param="tools")
        functions[name] = function
    if not functions:
        raise RequestError("tool_choice forces a call, but tools is empty", param="tool_choice")
    return functions


def _chosen_name(choice: object, functions: Mapping[str, Json]) -> str | None:
    """The function that must be called; None if any may."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        message = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise RequestError(f"{message}, got {choice!r:.200}", param="tool_choice")
    if name not in functions:
        raise RequestError(f"tool_choice names {name!r:.200}, which is not among tools", param="tool_choice")
    return name


def _parameters(function: Json) -> dict[str, object]:
    """Schema of a function's arguments. Raises: TypeError if it is no object."""
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        return {"type": "object"}
    if not isinstance(parameters, Mapping):
        raise TypeError(f"parameters of {function['name']!r} must be a JSON schema object, got {parameters!r:.200}")
    return dict(parameters)


def _any_call_schema(functions: Mapping[str, Json], parallel: bool) -> dict[str, object]:
    definitions: dict[str, object] = {}
    calls: list[object] = []
    for index, (name, function) in enumerate(functions.items()):
        parameters = _parameters(function)
        for key in _DEFINITION_KEYS:
            found = parameters.pop(key, None)
            if isinstance(found, Mapping):
                definitions |= {f"{index}.{word}": _rename_references(value, index) for word, value in found.items()}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [name]}, "parameters": _rename_references(parameters, index)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _rename_references(value: object, index: int) -> object:
    """`value` with its references into its own definitions led to the array's, where names carry the tool's index."""
    if isinstance(value, Mapping):
        return {
            key: _reference(item, index) if key == "$ref" else _rename_references(item, index)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_rename_references(item, index) for item in value]
    return value


def _reference(target: object, index: int) -> object:
    if not isinstance(target, str):
        return _rename_references(target, index)  # a property that happens to be called $ref
    for key in _DEFINITION_KEYS:
        if target.startswith(f"#/{key}/"):
            return f"#/$defs/{index}.{target[len(key) + 3 :]}"
    if target.startswith("#"):
        raise ValueError(f"the reference {target!r:.200} leads out of $defs")
    return target


class NamedCallParser:
    """The whole text is the arguments of one function. Without any text there is no call."""

    needs_special_tokens = False

    def __init__(self, name: str, make_id: MakeId = new_call_id) -> None:
        self._name = name
        self._make_id = make_id
        self._is_started = False
        self._space = ""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """No content, and one call."""
        return collect([*self.stream(text), *self.finish()])

    def stream(self, delta: str) -> list[Delta]:
        """The piece, as arguments; white space around them is dropped."""
        text = self._space + delta if self._is_started else delta.lstrip()
        arguments = text.rstrip()
        self._space = text[len(arguments) :]
        if not arguments:
            return []
        if self._is_started:
            return [ToolCallDelta(0, None, None, arguments)]
        self._is_started = True
        return [ToolCallDelta(0, self._make_id(), self._name, arguments)]

    def finish(self) -> list[Delta]:
        """Nothing: all is out."""
        return []


class ForcedCallParser:
    """The text is an array of {"name": ..., "parameters": ...}; text that is not, is content."""

    needs_special_tokens = False

    def __init__(self, make_id: MakeId = new_call_id) -> None:
        self._make_id = make_id
        self._buffer = ""
        self._num_calls = 0
        self._json: JsonScanner | None = None  # follows the arguments being streamed
        self._arguments_len = 0
        self._is_content = False

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """No content, if the constraint held, and the calls."""
        return collect([*self.stream(text), *self.finish()])

    def stream(self, delta: str) -> list[Delta]:
        """Heads of calls when they are complete, arguments as they come."""
        self._buffer += delta
        deltas: list[Delta] = []
        while self._buffer and not self._is_content:
            found = self._read_head() if self._json is None else self._read_arguments(self._json)
            if found is None:
                return deltas
            deltas.append(found)
        if self._buffer:
            deltas.append(ContentDelta(self._buffer))
            self._buffer = ""
        return deltas

    def finish(self) -> list[Delta]:
        """A head that was cut short is content; the end of the array is not."""
        text, self._buffer = self._buffer, ""
        if self._json is not None:
            return []  # arguments cut short are out already
        return [ContentDelta(text)] if text.strip(" \t\r\n,[]}") else []

    def _read_head(self) -> Delta | None:
        """The first delta of the next call, when its arguments begin."""
        start = 0
        while start < len(self._buffer) and self._buffer[start] in " \t\r\n,[]}":
            start += 1
        if start == len(self._buffer):
            return None
        head = _parse_head(self._buffer, start)
        if head is None:
            return None
        name, position = head
        if name is None:
            self._is_content = True
            text, self._buffer = self._buffer, ""
            return ContentDelta(text)
        self._buffer = self._buffer[position:]
        self._json = JsonScanner()
        self._arguments_len = 0
        self._num_calls += 1
        return ToolCallDelta(self._num_calls - 1, self._make_id(), name, "")

    def _read_arguments(self, scanner: JsonScanner) -> Delta | None:
        """More arguments of the call that is open, up to their end."""
        end = scanner.scan(self._buffer, 0)
        piece = self._buffer[self._arguments_len : end]
        self._arguments_len += len(piece)
        if end is not None:
            self._buffer = self._buffer[end:]
            self._json = None
        return ToolCallDelta(self._num_calls - 1, None, None, piece) if piece else None


_strings = msgspec.json.Decoder(str)


def _parse_head(text: str, start: int) -> tuple[str | None, int] | None:
    """Name in `{"name": "...", "parameters": {` at `start`, and where the arguments begin.

    None: the head is not all there. A name of None: this is something else.
    """
    position, words = start, []
    for mark in ("{", '"', ":", '"', ",", '"', ":"):
        position = skip_space(text, position)
        if position == len(text):
            return None
        if text[position] != mark:
            return None, start
        if mark != '"':
            position += 1
            continue
        end = _string_end(text, position)
        if end is None:
            return None
        words.append(text[position:end])
        position = end
    position = skip_space(text, position)
    if position == len(text):
        return None
    if words[0] != '"name"' or words[2].strip('"') not in _HEAD_KEYS or text[position] != "{":
        return None, start
    try:
        return _strings.decode(words[1].encode()), position
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None, start


def _string_end(text: str, start: int) -> int | None:
    """Position after the JSON string that begins at `start`, or None if it is not all there."""
    position = start + 1
    while position < len(text):
        if text[position] == '"':
            return position + 1
        position += 2 if text[position] == "\\" else 1
    return None
