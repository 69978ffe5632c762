"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere in the text, any number."""

from __future__ import annotations

from diptych.server.markup import JsonScanner, find_marker, skip_space
from diptych.server.tool_calls.deltas import read_calls
from diptych.server.tool_calls.parser import Opening, Reading

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesFormat:
    """Reads calls between <tool_call> and </tool_call>; the closing marker may be missing."""

    needs_special_tokens = False

    def __init__(self) -> None:
        self._json = JsonScanner()

    def find(self, text: str, *, is_fresh: bool, is_final: bool) -> Opening:
        """Where <tool_call> begins."""
        return Opening(*find_marker(text, OPEN, is_final))

    def read(self, text: str, is_final: bool) -> Reading | None:
        """One call, with both its markers."""
        start = skip_space(text, len(OPEN))
        if start == len(text):
            return None
        if text[start] != "{":
            return Reading(len(OPEN), None)
        end = self._json.scan(text, start)
        if end is None:
            return None
        after = skip_space(text, end)
        if text.startswith(CLOSE, after):
            after += len(CLOSE)
        elif not is_final and CLOSE.startswith(text[after:]):
            return None
        else:
            after = end
        self._json = JsonScanner()
        return Reading(after, read_calls(text[start:end]))
