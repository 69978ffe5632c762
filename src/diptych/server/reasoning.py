"""Splits a model's text into reasoning (<think>...</think>) and content, as it arrives.

Owns the markers and nothing else: calls of functions are read from the content afterwards. Any cut of the text into
pieces gives the same two texts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from diptych.server.markup import find_marker

OPEN = "<think>"
CLOSE = "</think>"


class ReasoningPiece(NamedTuple):
    """More reasoning, then more content; either may be empty."""

    reasoning: str
    content: str


class ReasoningParser(Protocol):
    """Splits one response. `parse` is for whole texts; `stream` and `finish` for pieces."""

    def parse(self, text: str) -> ReasoningPiece: ...

    def stream(self, delta: str) -> ReasoningPiece: ...

    def finish(self) -> ReasoningPiece: ...


class ThinkParser:
    """Reasoning between <think> at the start of the text, which may be missing, and </think>.

    White space around the markers belongs to them. Text without markers passes unchanged.

    Args: prompt: end of the prompt: many templates write the opening <think> themselves, or an empty <think></think>
    that turns thinking off; the text then begins inside, or after.
    """

    starts_inside = False

    def __init__(self, prompt: str = "") -> None:
        prompt = prompt.rstrip()
        self._is_inside = (self.starts_inside or prompt.endswith(OPEN)) and not prompt.endswith(CLOSE)
        self._may_open = not prompt.endswith(CLOSE)
        self._trims_start = self._is_inside  # the next text follows a marker
        self._buffer = ""

    def parse(self, text: str) -> ReasoningPiece:
        """Reasoning and content of a whole text."""
        first, last = self.stream(text), self.finish()
        return ReasoningPiece(first.reasoning + last.reasoning, first.content + last.content)

    def stream(self, delta: str) -> ReasoningPiece:
        """What is known after another piece of text."""
        self._buffer += delta
        return self._advance(is_final=False)

    def finish(self) -> ReasoningPiece:
        """What is left when no more text comes."""
        return self._advance(is_final=True)

    def _advance(self, *, is_final: bool) -> ReasoningPiece:
        if self._may_open and not self._open(is_final):
            return ReasoningPiece("", "")
        reasoning = self._take_reasoning(is_final) if self._is_inside else ""
        content = "" if self._is_inside else self._take(len(self._buffer))
        return ReasoningPiece(reasoning, content)

    def _open(self, is_final: bool) -> bool:
        """Take the opening marker, if the text begins with one; False while that is not known."""
        text = self._buffer.lstrip()
        if not is_final and len(text) < len(OPEN) and OPEN.startswith(text):
            return False
        self._may_open = False
        if text.startswith(OPEN):
            self._is_inside = self._trims_start = True
            self._buffer = text[len(OPEN) :]
        return True

    def _take_reasoning(self, is_final: bool) -> str:
        position, is_closed = find_marker(self._buffer, CLOSE, is_final)
        end = len(self._buffer[:position].rstrip())  # white space waits: it may be before the marker
        reasoning = self._take(end)
        if is_closed:
            self._buffer = self._buffer[position - end + len(CLOSE) :]
            self._is_inside = False
            self._trims_start = True
        elif is_final:
            self._buffer = ""
        return reasoning

    def _take(self, end: int) -> str:
        """The buffer's first `end` characters, without white space after a marker."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._trims_start:
            text = text.lstrip()
            self._trims_start = not text
        return text


class DeepseekR1Parser(ThinkParser):
    """The text begins inside the reasoning: DeepSeek R1's template, and models that leave out the opening marker."""

    starts_inside = True


PARSERS: dict[str, type[ThinkParser]] = {
    "think": ThinkParser,
    "qwen3": ThinkParser,
    "deepseek_r1": DeepseekR1Parser,
}


def make_reasoning_parser(name: str, prompt: str = "") -> ReasoningParser | None:
    """A parser for one response, or None for "none".

    Args: name: "none" or a key of PARSERS. prompt: the rendered prompt.
    """
    return None if name == "none" else PARSERS[name](prompt)
