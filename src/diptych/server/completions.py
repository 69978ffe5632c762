"""POST /v1/completions: prompts of any shape, echo, logprobs, streaming."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diptych.core.request import SamplingParams
from diptych.errors import RequestError, Unsupported
from diptych.server.bodies import read_schema
from diptych.server.errors import json_response
from diptych.server.generation import Chunk, Generation, GenerationService, run_all, stream_all
from diptych.server.logprobs import CompletionLogprobs, prompt_entries, vllm_prompt_logprobs
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
from diptych.server.schemas import CompletionRequest
from diptych.server.state import ServerState, id_header, request_id_of
from diptych.server.streaming import EventStream, while_connected
from diptych.server.structured import openai_grammar

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 2048


@dataclass
class _Choice:
    """One sequence of the answer. `prompt_text` is what echo puts before the output."""

    generation: Generation
    index: int
    prompt_text: str
    logprobs: CompletionLogprobs | None
    has_echoed: bool = False


async def complete(state: ServerState, request: Request) -> Response:
    """Serve POST /v1/completions."""
    body = await read_schema(request, CompletionRequest, state.max_body_nbytes)
    service = state.service
    body.lora_path = state.adapter_of(body.model, body.lora_path)
    _refuse_unsupported(body)
    sampling = _sampling(body)
    request_id = request_id_of(request, body.rid, body.request_id)
    answer = _Answer(service, body, sampling, response_id("cmpl", request_id), body.model or state.model_name)
    headers = id_header(answer.id)
    if body.stream:
        return EventStream(answer.events(), headers)
    return json_response(await while_connected(request, answer.whole()), headers=headers)


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.suffix:
        raise Unsupported("suffix is not supported: this engine continues text only at its end", param="suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise Unsupported(
            f"best_of ({body.best_of}) must equal n ({body.n}): sequences are not ranked", param="best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1, got 0 (0 needs echo)", param="max_tokens")


def _sampling(body: CompletionRequest) -> SamplingParams:
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return openai_sampling(
        body,
        {},
        max_tokens=body.max_tokens or (None if body.max_tokens is None else 1),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=openai_grammar(body),
    )


def parse_prompts(value: object, param: str) -> list[str | list[int]]:
    """Texts or lists of token ids, from any of the four shapes. Raises: RequestError for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"{param} must be a text, a list of token ids, or a list of either, and not empty", param=param
        )
    if all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value):
        if len(value) > MAX_PROMPTS:
            raise RequestError(f"{param} holds {len(value)} prompts; at most {MAX_PROMPTS} are accepted", param=param)
        return value
    return [value]


class _Answer:
    """One answer in the making."""

    def __init__(
        self, service: GenerationService, body: CompletionRequest, sampling: SamplingParams, public_id: str, model: str
    ) -> None:
        self.id = public_id
        self._service = service
        self._body = body
        self._sampling = sampling
        self._head = ResponseHead(public_id, "text_completion", model)

    async def whole(self) -> dict[str, Any]:
        """The complete response."""
        choices = await self._submit()
        generations = [choice.generation for choice in choices]
        await run_all(generations)
        response = self._head.whole([self._whole_choice(choice) for choice in choices], usage_of(generations))
        return response | ticket_of(self._service.matchmaker, self._body, self.id)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as a stream."""
        choices = {id(choice.generation): choice for choice in await self._submit()}
        generations = [choice.generation for choice in choices.values()]
        writer = self._head.events(self._body.stream_options)
        stream = stream_all(generations)
        try:
            async for generation, chunk in stream:
                event = self._event(writer, choices[id(generation)], chunk, generations)
                if event:
                    yield event
        finally:
            await stream.aclose()
        yield writer.end(generations)

    async def _submit(self) -> list[_Choice]:
        body, choices = self._body, list[_Choice]()
        await self._service.check_grammar(self._sampling.grammar)
        prompts = parse_prompts(body.prompt, "prompt")
        handoffs = await self._service.matchmaker.handoffs(body, [body.n] * len(prompts))
        for index, prompt in enumerate(prompts):
            token_ids, text = await self._tokenize(prompt)
            options = generation_options(
                body,
                self.id,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                continues_prompt=True,
                discards_output=body.max_tokens == 0,
                handoffs=handoffs[index * body.n : (index + 1) * body.n],
            )
            for generation in self._service.submit(token_ids, self._sampling, options):
                logprobs = (
                    None if body.logprobs is None else CompletionLogprobs(self._service.token_texts, body.logprobs)
                )
                choices.append(_Choice(generation, len(choices), text, logprobs))
        return choices

    async def _tokenize(self, prompt: str | list[int]) -> tuple[list[int], str]:
        """Token ids and, for echo, the text."""
        if isinstance(prompt, str):
            return await self._service.encode(prompt, add_special_tokens=self._body.add_special_tokens), prompt
        token_ids = self._service.check_token_ids(prompt, "prompt")
        if not self._body.echo:
            return token_ids, ""
        return token_ids, self._service.tokenizer.decode(token_ids, skip_special_tokens=self._body.skip_special_tokens)

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        generation, body = choice.generation, self._body
        result: dict[str, Any] = {
            "index": choice.index,
            "text": choice.prompt_text + generation.text if body.echo else generation.text,
            "logprobs": self._logprobs(choice, generation.token_ids, generation.logprobs),
            **ending(generation, self._service.info.eos_token_ids),
        }
        if body.return_token_ids:
            result["prompt_token_ids"] = generation.request.prompt_token_ids
            result["token_ids"] = generation.token_ids
        if body.prompt_logprobs is not None:
            result["prompt_logprobs"] = self._prompt_logprobs(generation)
        return result

    def _event(self, writer: EventWriter, choice: _Choice, chunk: Chunk, generations: list[Generation]) -> bytes | None:
        """News of one choice; None while there is nothing to show."""
        body, generation = self._body, choice.generation
        shows_tokens = bool(chunk.token_ids) and (choice.logprobs is not None or body.return_token_ids)
        if not (chunk.text or chunk.is_last or chunk.is_first or shows_tokens):
            return None
        text = choice.prompt_text + chunk.text if body.echo and not choice.has_echoed else chunk.text
        logprobs = self._logprobs(choice, chunk.token_ids, chunk.logprobs)
        result: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if chunk.is_last:
            result |= ending(generation, self._service.info.eos_token_ids)
        if body.return_token_ids:
            result["token_ids"] = chunk.token_ids
        if not choice.has_echoed:
            choice.has_echoed = True
            if body.return_token_ids:
                result["prompt_token_ids"] = generation.request.prompt_token_ids
            if body.prompt_logprobs is not None:
                result["prompt_logprobs"] = self._prompt_logprobs(generation)
        return writer.choice(result, generations)

    def _logprobs(self, choice: _Choice, token_ids: list[int], entries: list[Any]) -> dict[str, Any] | None:
        """`logprobs` of these output tokens, after the prompt's if this is the first time and echo is on."""
        if choice.logprobs is None:
            return None
        if self._body.echo and not choice.has_echoed:
            generation = choice.generation
            prompt = generation.request.prompt_token_ids
            entries = [*prompt_entries(len(prompt), 0, generation.prompt_logprobs), *entries]
            token_ids = [*prompt, *token_ids]
        return choice.logprobs.of(token_ids, entries)

    def _prompt_logprobs(self, generation: Generation) -> list[Any]:
        entries = prompt_entries(generation.num_prompt_tokens, 0, generation.prompt_logprobs)
        return list(vllm_prompt_logprobs(self._service.token_texts, entries))
