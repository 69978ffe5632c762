"""Splits what a model writes in a chat into reasoning, content and calls of functions.

Whole answers and streams go the same way: a whole answer is a stream of one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diptych.server.reasoning import ReasoningParser
from diptych.server.tool_calls import ContentDelta, Delta, ToolCallParser


@dataclass(slots=True)
class ChatDelta:
    """News of one message. tool_calls: OpenAI's objects for streams."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class ChatText:
    """Reads one sequence's text.

    Args: reasoning, tool_calls: fresh parsers, or None. streams_reasoning: else reasoning comes out in one piece.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | None, *, streams_reasoning: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._streams_reasoning = streams_reasoning
        self._held_reasoning = ""
        self.num_calls = 0

    def add(self, text: str, is_last: bool) -> ChatDelta:
        """What another piece of text brings."""
        if self._reasoning is None and self._tool_calls is None:
            return ChatDelta(text)
        delta = ChatDelta()
        content = self._split_reasoning(text, is_last, delta)
        if self._tool_calls is None:
            delta.content = content
            return delta
        pieces = self._tool_calls.stream(content) if content else []
        if is_last:
            pieces = [*pieces, *self._tool_calls.finish()]
        for piece in pieces:
            self._take(piece, delta)
        return delta

    def _split_reasoning(self, text: str, is_last: bool, delta: ChatDelta) -> str:
        """Content of the piece; its reasoning goes into `delta`."""
        if self._reasoning is None:
            return text
        reasoning, content = self._reasoning.stream(text)
        if is_last:
            rest = self._reasoning.finish()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        self._held_reasoning += reasoning
        if self._streams_reasoning or content or is_last:
            delta.reasoning, self._held_reasoning = self._held_reasoning, ""
        return content

    def _take(self, piece: Delta, delta: ChatDelta) -> None:
        if isinstance(piece, ContentDelta):
            delta.content += piece.text
            return
        function: dict[str, Any] = {"arguments": piece.arguments}
        call: dict[str, Any] = {"index": piece.index, "function": function}
        if piece.call_id is not None:
            self.num_calls += 1
            call |= {"id": piece.call_id, "type": "function"}
            function["name"] = piece.name
        delta.tool_calls.append(call)


def whole_message(text: ChatText, generated: str) -> dict[str, Any]:
    """The message of a complete answer."""
    delta = text.add(generated, True)
    calls: list[dict[str, Any]] = []
    for piece in delta.tool_calls:
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": piece["function"]})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    if calls:
        message["content"] = delta.content or None
        message["tool_calls"] = calls
    reasoning = delta.reasoning or None
    return {**message, "reasoning_content": reasoning, "reasoning": reasoning}
