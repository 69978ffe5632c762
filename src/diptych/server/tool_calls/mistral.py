"""Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], and the newer [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re

from diptych.server.markup import JsonScanner, find_marker, skip_space
from diptych.server.tool_calls.deltas import WrittenCall, read_arguments, read_calls
from diptych.server.tool_calls.parser import Opening, Reading

OPEN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"

_word = re.compile(r"[\w.\-]*")


class MistralFormat:
    """Reads both forms. The markers are special tokens, so the text must hold those."""

    needs_special_tokens = True

    def __init__(self) -> None:
        self._json = JsonScanner()

    def find(self, text: str, *, is_fresh: bool, is_final: bool) -> Opening:
        """Where [TOOL_CALLS] begins."""
        return Opening(*find_marker(text, OPEN, is_final))

    def read(self, text: str, is_final: bool) -> Reading | None:
        """One array of calls, or one named call."""
        start = skip_space(text, len(OPEN))
        if start == len(text):
            return None
        if text[start] not in "[{":
            return self._read_named(text, start)
        end = self._json.scan(text, start)
        if end is None:
            return None
        self._json = JsonScanner()
        return Reading(end, read_calls(text[start:end]))

    def _read_named(self, text: str, start: int) -> Reading | None:
        """name[ARGS]{...} or name[CALL_ID]id[ARGS]{...} or name{...}."""
        name, position = _read_word(text, start)
        call_id: str | None = None
        if text.startswith(CALL_ID, position):
            call_id, position = _read_word(text, position + len(CALL_ID))
        if text.startswith(ARGUMENTS, position):
            position += len(ARGUMENTS)
        elif CALL_ID.startswith(text[position:]) or ARGUMENTS.startswith(text[position:]):
            return None
        position = skip_space(text, position)
        if position == len(text):
            return None
        if not name or call_id == "" or text[position] != "{":
            return Reading(len(OPEN), None)
        end = self._json.scan(text, position)
        if end is None:
            return None
        self._json = JsonScanner()
        arguments = read_arguments(text[position:end])
        return Reading(end, None if arguments is None else [WrittenCall(name, arguments, call_id)])


def _read_word(text: str, start: int) -> tuple[str, int]:
    """The name or id at `start`, and where it ends; an unfinished one ends with the text."""
    match = _word.match(text, start)
    end = match.end() if match else start
    return text[start:end], end
