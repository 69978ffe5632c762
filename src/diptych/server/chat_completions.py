"""POST /v1/chat/completions: conversations, tools, reasoning, streaming."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diptych.core.request import SamplingParams
from diptych.errors import RequestError
from diptych.server.bodies import read_schema
from diptych.server.chat_text import ChatDelta, ChatText, whole_message
from diptych.server.errors import json_response
from diptych.server.generation import Chunk, Generation, run_all, stream_all
from diptych.server.logprobs import chat_logprobs, prompt_entries, vllm_prompt_logprobs
from diptych.server.openai_format import (
    EventWriter,
    ResponseHead,
    ending,
    generation_options,
    response_id,
    ticket_of,
    usage_of,
)
from diptych.server.parameters import openai_sampling
from diptych.server.reasoning import make_reasoning_parser
from diptych.server.schemas import ChatRequest
from diptych.server.state import ServerState, id_header, request_id_of, tool_dicts
from diptych.server.streaming import EventStream, while_connected
from diptych.server.structured import openai_grammar
from diptych.server.tool_calls import ToolCallParser, make_parser, tool_choice_parser, tool_choice_schema


@dataclass
class _Choice:
    """One sequence of the answer."""

    generation: Generation
    text: ChatText
    has_begun: bool = False


async def chat(state: ServerState, request: Request) -> Response:
    """Serve POST /v1/chat/completions."""
    body = await read_schema(request, ChatRequest, state.max_body_nbytes)
    _ = state.service
    body.lora_path = state.adapter_of(body.model, body.lora_path)
    answer = _Answer(state, body, response_id("chatcmpl", request_id_of(request, body.rid, body.request_id)))
    headers = id_header(answer.id)
    if body.stream:
        return EventStream(answer.events(), headers)
    return json_response(await while_connected(request, answer.whole()), headers=headers)


class _Answer:
    """One answer in the making. Raises: RequestError for a body that contradicts itself."""

    def __init__(self, state: ServerState, body: ChatRequest, public_id: str) -> None:
        self.id = public_id
        self._state = state
        self._service = state.service
        self._body = body
        self._tools = tool_dicts(body)
        self._limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self._sampling = self._make_sampling()
        self._prompt_text = ""

    async def whole(self) -> dict[str, Any]:
        """The complete response."""
        choices = await self._submit()
        generations = [choice.generation for choice in choices]
        await run_all(generations)
        head = self._head("chat.completion")
        response = head.whole([self._whole_choice(choice) for choice in choices], usage_of(generations))
        ticket = ticket_of(self._service.matchmaker, self._body, self.id)
        return response | ticket | self._prompt_fields(generations[0])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as a stream."""
        choices = await self._submit()
        generations = [choice.generation for choice in choices]
        writer = self._head("chat.completion.chunk").events(self._body.stream_options)
        async with aclosing(stream_all(generations)) as stream:
            async for generation, chunk in stream:
                events = self._events(writer, choices[generation.index], chunk, generations)
                if events:
                    yield events
        yield writer.end(generations)

    def _head(self, kind: str) -> ResponseHead:
        return ResponseHead(self.id, kind, self._body.model or self._state.model_name)

    async def _submit(self) -> list[_Choice]:
        body = self._body
        await self._service.check_grammar(self._sampling.grammar)
        handoffs = await self._service.matchmaker.handoffs(body, [body.n])
        rendered = await self._state.render(body)
        self._prompt_text = rendered.text
        token_ids = await self._service.encode(
            rendered.text, add_special_tokens=rendered.add_special_tokens, param="messages"
        )
        options = generation_options(
            body,
            self.id,
            default_max_tokens=None,
            limit_name=self._limit_name,
            continues_prompt=body.continue_final_message,
            handoffs=handoffs,
        )
        generations = self._service.submit(token_ids, self._sampling, options, param="messages")
        return [_Choice(generation, self._reader()) for generation in generations]

    def _make_sampling(self) -> SamplingParams:
        body = self._body
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if body.max_tokens == 0:
            raise RequestError("max_tokens must be at least 1, got 0", param="max_tokens")
        grammar, forced = openai_grammar(body), None
        if body.tool_choice not in (None, "auto", "none"):
            forced = tool_choice_schema(self._tools or [], body.tool_choice, parallel=body.parallel_tool_calls)
        if grammar is not None and forced is not None:
            raise RequestError(
                "tool_choice forces a call and cannot be combined with another constraint", param="tool_choice"
            )
        sampling = openai_sampling(
            body,
            {"logprobs": "top_logprobs", "max_tokens": self._limit_name},
            max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            grammar=grammar or forced,
        )
        parser = self._tool_parser()
        # Whoever asks for text beyond EOS (a benchmark) does not want the plain template's stops either.
        default_stop = () if body.ignore_eos else self._state.text.chat_template.default_stop
        return msgspec.structs.replace(
            sampling,
            stop=(*sampling.stop, *default_stop),
            skip_special_tokens=sampling.skip_special_tokens and not (parser and parser.needs_special_tokens),
        )

    def _tool_parser(self) -> ToolCallParser | None:
        """A fresh parser, if there are tools to be called."""
        if self._tools is None:
            return None
        forced = tool_choice_parser(self._tools, self._body.tool_choice)
        if forced is not None:
            return forced
        name = self._state.text.tool_call_parser
        return None if name == "none" else make_parser(name)

    def _reader(self) -> ChatText:
        # Constrained text holds no reasoning: the grammar rules from the first token.
        wants_reasoning = self._body.separate_reasoning and self._sampling.grammar is None
        name = self._state.config.server.reasoning_parser if wants_reasoning else "none"
        return ChatText(
            make_reasoning_parser(name, self._prompt_text),
            self._tool_parser(),
            streams_reasoning=self._body.stream_reasoning,
        )

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        generation = choice.generation
        result: dict[str, Any] = {
            "index": generation.index,
            "message": whole_message(choice.text, generation.text),
            "logprobs": self._logprobs(generation.logprobs),
            **self._ending(choice),
        }
        if self._body.return_token_ids:
            result["token_ids"] = generation.token_ids
        return result

    def _events(self, writer: EventWriter, choice: _Choice, chunk: Chunk, generations: list[Generation]) -> bytes:
        """News of one choice as events; the first also says whose turn it is. Empty while there is nothing to show."""
        events = b""
        if not choice.has_begun:
            choice.has_begun = True
            events = self._opening(writer, choice, generations)
        delta = choice.text.add(chunk.text, chunk.is_last)
        fields = _delta_fields(delta)
        shows_tokens = bool(chunk.token_ids) and (self._body.logprobs or self._body.return_token_ids)
        if not (fields or chunk.is_last or shows_tokens):
            return events
        result: dict[str, Any] = {
            "index": choice.generation.index,
            "delta": fields,
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": None,
        }
        if chunk.is_last:
            result |= self._ending(choice)
        if self._body.return_token_ids:
            result["token_ids"] = chunk.token_ids
        return events + writer.choice(result, generations)

    def _opening(self, writer: EventWriter, choice: _Choice, generations: list[Generation]) -> bytes:
        result: dict[str, Any] = {
            "index": choice.generation.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if choice.generation.index == 0:
            result |= self._prompt_fields(choice.generation)
        return writer.choice(result, generations)

    def _prompt_fields(self, generation: Generation) -> dict[str, Any]:
        """What the client asked to know about the prompt."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = generation.request.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            entries = prompt_entries(generation.num_prompt_tokens, 0, generation.prompt_logprobs)
            fields["prompt_logprobs"] = vllm_prompt_logprobs(self._service.token_texts, entries)
        return fields

    def _ending(self, choice: _Choice) -> dict[str, Any]:
        fields = ending(choice.generation, self._service.info.eos_token_ids)
        if choice.text.num_calls and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "tool_calls"
        return fields

    def _logprobs(self, entries: list[Any]) -> dict[str, Any] | None:
        return chat_logprobs(self._service.token_texts, entries) if self._body.logprobs else None


def _delta_fields(delta: ChatDelta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.content:
        fields["content"] = delta.content
    if delta.reasoning:
        fields["reasoning_content"] = fields["reasoning"] = delta.reasoning
    if delta.tool_calls:
        fields["tool_calls"] = delta.tool_calls
    return fields
