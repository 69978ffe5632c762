"""Llama 3: JSON objects {"name": ..., "parameters": {...}}, after <|python_tag|> or alone, separated by ";"."""

from __future__ import annotations

from diptych.server.markup import JsonScanner, find_marker, skip_space
from diptych.server.tool_calls.deltas import read_calls
from diptych.server.tool_calls.parser import Opening, Reading

TAG = "<|python_tag|>"
SEPARATORS = ";,"


class Llama3Format:
    """Reads an object as a call if it has a name and parameters, at the start, after another call or after the tag.

    The tag is a special token that most texts come without, so that it is not asked for.
    """

    needs_special_tokens = False

    def __init__(self) -> None:
        self._json = JsonScanner()
        self._is_after_call = False

    def find(self, text: str, *, is_fresh: bool, is_final: bool) -> Opening:
        """Where the tag or, on fresh text, an object begins."""
        if is_fresh:
            start = self._skip_separator(text)
            if text.startswith(("{", TAG), start):
                return Opening(0, True)
            if not is_final and TAG.startswith(text[start:]):
                return Opening(0, False)
        return Opening(*find_marker(text, TAG, is_final))

    def read(self, text: str, is_final: bool) -> Reading | None:
        """One object, with the separator and the tag before it."""
        opening_len = self._skip_separator(text)
        if text.startswith(TAG, opening_len):
            opening_len += len(TAG)
        start = skip_space(text, opening_len)
        if start == len(text):
            return None
        if text[start] != "{":
            return Reading(opening_len, None)
        end = self._json.scan(text, start)
        if end is None:
            return None
        self._json = JsonScanner()
        calls = read_calls(text[start:end], needs_arguments=True)
        self._is_after_call = calls is not None
        return Reading(end, calls)

    def _skip_separator(self, text: str) -> int:
        start = skip_space(text, 0)
        if self._is_after_call and start < len(text) and text[start] in SEPARATORS:
            start = skip_space(text, start + 1)
        return start
