"""Finding the markers that models put into their text, when the text arrives in pieces.

Owns two questions: where does a marker begin or still could, and where does a JSON value end. Knows no format.
"""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


def partial_marker_len(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def find_marker(text: str, marker: str, is_final: bool) -> tuple[int, bool]:
    """Where `marker` begins in `text`, and whether it is there as a whole.

    Without it: where a marker that more text may complete begins, else the end of the text.
    """
    position = text.find(marker)
    if position >= 0:
        return position, True
    return len(text) - (0 if is_final else partial_marker_len(text, marker)), False


def skip_space(text: str, start: int) -> int:
    """First position from `start` on that holds no white space, or the end of the text."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


class JsonScanner:
    """Finds the end of one JSON object or array in a text that grows; each character is looked at once.

    Only brackets and strings are followed: what is between them may still be no JSON.
    """

    def __init__(self) -> None:
        self._position: int | None = None
        self._depth = 0
        self._is_string = False
        self._end: int | None = None

    def scan(self, text: str, start: int) -> int | None:
        """Position after the value that begins at `start`, or None if `text` ends before it does.

        Call again with the same `start` and a longer `text` to go on.
        """
        if self._end is not None:
            return self._end
        position = start if self._position is None else self._position
        while True:
            match = (_STRING_END if self._is_string else _STRUCTURE).search(text, position)
            if match is None:
                self._position = len(text)
                return None
            position = match.end()
            character = match.group()
            if character == "\\":
                if position == len(text):  # the escaped character has not arrived
                    self._position = match.start()
                    return None
                position += 1
            elif character == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    self._end = position
                    return position
