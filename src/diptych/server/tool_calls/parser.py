"""The stream that every tool call format shares: what is content, what is a call, what must wait.

Text arrives in any pieces and the outcome is the same, because `parse` is the stream in one piece. A call is yielded
when its JSON is complete and well-formed; anything else stays content, to the last character: a half-streamed call
could not be taken back. White space before a call, and after the last one, is markup. Knows no format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from diptych.server.tool_calls.deltas import (
    ContentDelta,
    Delta,
    MakeId,
    ToolCall,
    ToolCallDelta,
    WrittenCall,
    collect,
    new_call_id,
)


class ToolCallParser(Protocol):
    """Reads the calls out of one response. `parse` is for whole texts; `stream` and `finish` for pieces."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether its markers are special tokens, so that the text must be detokenized with them."""
        ...

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Content and calls of a whole text; on a fresh parser."""
        ...

    def stream(self, delta: str) -> list[Delta]:
        """What is known after another piece of text."""
        ...

    def finish(self) -> list[Delta]:
        """What is left when no more text comes."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """The text before `position` is content for sure; at `position` a call begins, or still could (not is_call)."""

    position: int
    is_call: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """The text up to `end` is these calls; None: it is no call after all."""

    end: int
    calls: list[WrittenCall] | None


class CallFormat(Protocol):
    """How one family of models writes calls. One object reads one response, from left to right."""

    needs_special_tokens: bool

    def __init__(self) -> None: ...

    def find(self, text: str, *, is_fresh: bool, is_final: bool) -> Opening:
        """Where the next call begins. is_fresh: only white space came since the start or the last call."""
        ...

    def read(self, text: str, is_final: bool) -> Reading | None:
        """The call at the start of `text`; None if its end has not arrived. Called again with a longer text."""
        ...


class MarkedCallParser:
    """A ToolCallParser over a CallFormat. Args: make_id: names the calls that the model gave no id."""

    def __init__(self, call_format: CallFormat, make_id: MakeId = new_call_id) -> None:
        self._format = call_format
        self._make_id = make_id
        self._buffer = ""
        self._space = ""  # white space that is markup if a call follows
        self._is_reading = False
        self._is_fresh = True
        self._num_calls = 0

    @property
    def needs_special_tokens(self) -> bool:
        """Whether its markers are special tokens."""
        return self._format.needs_special_tokens

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Content and calls of a whole text."""
        return collect([*self.stream(text), *self.finish()])

    def stream(self, delta: str) -> list[Delta]:
        """What is known after another piece of text."""
        self._buffer += delta
        return self._advance(is_final=False)

    def finish(self) -> list[Delta]:
        """What is left when no more text comes."""
        deltas = self._advance(is_final=True)
        deltas += self._content(self._buffer)
        self._buffer = ""
        if self._space and not (self._is_fresh and self._num_calls):
            deltas.append(ContentDelta(self._space))
        self._space = ""
        return deltas

    def _advance(self, *, is_final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._buffer:
            if not self._is_reading:
                opening = self._format.find(self._buffer, is_fresh=self._is_fresh, is_final=is_final)
                deltas += self._content(self._buffer[: opening.position])
                self._buffer = self._buffer[opening.position :]
                if not opening.is_call:
                    break
                self._is_reading = True
            reading = self._format.read(self._buffer, is_final)
            if reading is None:
                break
            self._is_reading = False
            text, self._buffer = self._buffer[: reading.end], self._buffer[reading.end :]
            deltas += self._content(text) if reading.calls is None else self._calls(reading.calls)
        return deltas

    def _content(self, text: str) -> list[Delta]:
        """Content, without the white space at its end, which waits for what follows."""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if not content:
            return []
        self._is_fresh = False
        return [ContentDelta(content)]

    def _calls(self, calls: list[WrittenCall]) -> list[Delta]:
        self._space = ""
        self._is_fresh = True
        deltas: list[Delta] = []
        for call in calls:
            deltas.append(ToolCallDelta(self._num_calls, call.call_id or self._make_id(), call.name, call.arguments))
            self._num_calls += 1
        return deltas
