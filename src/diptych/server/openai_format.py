"""Parts that both OpenAI routes answer with: ids, usage, reasons, and the writer of stream events.

The writer composes an event from bytes prepared once, since it runs for every token of every stream.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from diptych.core.request import HandTo, TakeFrom
from diptych.server.generation import Generation, GenerationOptions
from diptych.server.matchmaker import Matchmaker
from diptych.server.schemas import OpenAIRequest, StreamOptions
from diptych.server.streaming import DONE


def generation_options(
    body: OpenAIRequest,
    request_id: str,
    *,
    default_max_tokens: int | None,
    limit_name: str = "max_tokens",
    continues_prompt: bool,
    discards_output: bool = False,
    handoffs: Sequence[HandTo | TakeFrom | None] = (),
) -> GenerationOptions:
    """What the body says beside prompt and sampling."""
    return GenerationOptions(
        request_id=request_id,
        n=body.n,
        cache_key=cache_key(body.cache_salt, body.extra_key),
        adapter=body.lora_path,
        priority=body.priority,
        timeout_s=body.timeout,
        default_max_tokens=default_max_tokens,
        limit_name=limit_name,
        continues_prompt=continues_prompt,
        discards_output=discards_output,
        handoffs=handoffs,
    )


def ticket_of(matchmaker: Matchmaker, body: OpenAIRequest, response_id: str) -> dict[str, Any]:
    """vLLM's `kv_transfer_params` of an answer, if the request is the prefill half of two and asks for them."""
    if body.kv_transfer_params is None or not body.kv_transfer_params.do_remote_decode:
        return {}
    return {"kv_transfer_params": matchmaker.ticket(body, response_id)}


def cache_key(cache_salt: str, extra_key: str) -> str:
    """One key for the two names under which prompts are kept apart in the prefix cache."""
    return f"{cache_salt}\x00{extra_key}" if cache_salt or extra_key else ""


def usage_of(generations: Iterable[Generation]) -> dict[str, Any]:
    """OpenAI's `usage`; a prompt counts once, however many sequences continue it."""
    sequences = list(generations)
    firsts = [generation for generation in sequences if generation.index == 0]
    num_prompt = sum(generation.num_prompt_tokens for generation in firsts)
    num_output = sum(len(generation.token_ids) for generation in sequences)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(first.cached_tokens for first in firsts)},
    }


def ending(generation: Generation, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Why a sequence ended: OpenAI's reason, vLLM's `stop_reason`, SGLang's `matched_stop` (which also shows EOS)."""
    matched = generation.matched_stop
    return {
        "finish_reason": None if generation.finish_reason is None else str(generation.finish_reason),
        "stop_reason": None if matched in eos_token_ids else matched,
        "matched_stop": matched,
    }


class ResponseHead:
    """What every object of one answer begins with.

    Args: response_id: with its prefix. kind: the value of `object`.
    """

    def __init__(self, response_id: str, kind: str, model: str) -> None:
        self._fields = {"id": response_id, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A complete response."""
        return {**self._fields, "choices": choices, "usage": usage}

    def events(self, options: StreamOptions | None) -> EventWriter:
        """Writer for a streamed response."""
        return EventWriter(self._fields, options or StreamOptions())


class EventWriter:
    """Writes the events of one streamed response."""

    def __init__(self, fields: dict[str, Any], options: StreamOptions) -> None:
        self._fields = fields
        self._prefix = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self._includes_usage = options.include_usage
        self._is_continuous = options.include_usage and options.continuous_usage_stats

    def choice(self, choice: dict[str, Any], generations: list[Generation]) -> bytes:
        """One choice's news, with the usage so far if the client wants it every time."""
        if self._is_continuous:
            return self._with_usage(orjson.dumps(choice, option=orjson.OPT_NON_STR_KEYS), generations)
        return b"%b%b%b" % (self._prefix, orjson.dumps(choice, option=orjson.OPT_NON_STR_KEYS), self._suffix)

    def end(self, generations: list[Generation]) -> bytes:
        """The usage, if asked for, and [DONE]."""
        return (self._with_usage(b"", generations) if self._includes_usage else b"") + DONE

    def _with_usage(self, choice: bytes, generations: list[Generation]) -> bytes:
        return self._prefix + choice + b'],"usage":' + orjson.dumps(usage_of(generations)) + b"}\n\n"


def response_id(prefix: str, request_id: str) -> str:
    """The id of a response: the client's own, or a new one with OpenAI's prefix."""
    return request_id or f"{prefix}-{uuid.uuid4().hex}"
