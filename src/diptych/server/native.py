"""POST /generate: SGLang's route, single or batched, cumulative streaming."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diptych.core.batch import Speculation
from diptych.core.request import HandTo, SamplingParams, TakeFrom
from diptych.errors import RequestError
from diptych.server.bodies import read_schema, validated
from diptych.server.completions import MAX_PROMPTS
from diptych.server.errors import json_response
from diptych.server.generation import Generation, GenerationOptions, GenerationService, run_all, stream_all
from diptych.server.logprobs import NativeLogprobs, prompt_entries
from diptych.server.openai_format import response_id
from diptych.server.parameters import native_sampling
from diptych.server.schemas import GenerateRequest, NativeSampling
from diptych.server.state import ServerState, id_header, request_id_of
from diptych.server.streaming import DONE, EventStream, event, while_connected


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One prompt of a batch, with what its place in the parallel lists says."""

    prompt: str | list[int]
    rid: str
    sampling: NativeSampling
    returns_logprobs: bool
    logprob_start: int
    num_top: int
    logprob_token_ids: list[int]
    priority: int
    cache_key: str
    adapter: str


async def generate(state: ServerState, request: Request) -> Response:
    """Serve POST and PUT /generate."""
    body = await read_schema(request, GenerateRequest, state.max_body_nbytes)
    answer = NativeAnswer(state.service, body, request_id_of(request))
    headers = id_header(answer.first_id)
    if body.stream:
        return EventStream(answer.events(), headers)
    return json_response(await while_connected(request, answer.whole()), headers=headers)


class NativeAnswer:
    """One answer in the making. `body`: validated. header_id: a request id from outside the body, or empty."""

    def __init__(self, service: GenerationService, body: GenerateRequest, header_id: str) -> None:
        self._service = service
        self._logprobs = NativeLogprobs(service.token_texts, with_text=body.return_text_in_logprobs)
        self._body = body
        self._timeout_s = body.timeout
        self._items, self._is_batch = _items(body, header_id)
        self.first_id = self._items[0].rid

    async def whole(self) -> list[dict[str, Any]] | dict[str, Any]:
        """The complete response: an object, or a list for a batch or n above 1."""
        sequences = await self._submit()
        await run_all([generation for _, generation in sequences])
        results = [self._result(item, generation) for item, generation in sequences]
        return results if self._is_batch or len(results) > 1 else results[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as a stream of server-sent events."""
        async with aclosing(self.results()) as results:
            async for result in results:
                yield event(result)
        yield DONE

    async def results(self) -> AsyncGenerator[dict[str, Any], None]:
        """The response as it grows; each item repeats the whole text so far."""
        sequences = await self._submit()
        places = {id(generation): (index, item) for index, (item, generation) in enumerate(sequences)}
        has_index = self._is_batch or len(sequences) > 1
        async with aclosing(stream_all([generation for _, generation in sequences])) as stream:
            async for generation, chunk in stream:
                if not (chunk.text or chunk.is_last or chunk.is_first):
                    continue
                index, item = places[id(generation)]
                result = self._result(item, generation)
                if has_index:
                    result["index"] = index
                yield result

    async def _submit(self) -> list[tuple[_Item, Generation]]:
        handoffs = iter(await self._service.matchmaker.handoffs(self._body, [item.sampling.n for item in self._items]))
        return [
            (item, generation)
            for item in self._items
            for generation in await self._submit_item(item, list(islice(handoffs, item.sampling.n)))
        ]

    async def _submit_item(self, item: _Item, handoffs: list[HandTo | TakeFrom | None]) -> list[Generation]:
        if isinstance(item.prompt, str):
            token_ids = await self._service.encode(item.prompt, param="text")
        else:
            token_ids = self._service.check_token_ids(item.prompt, "input_ids")
        if item.returns_logprobs and item.logprob_start >= len(token_ids):
            raise RequestError(
                f"logprob_start_len ({item.logprob_start}) must be below the prompt's {len(token_ids)} tokens",
                param="logprob_start_len",
            )
        options = GenerationOptions(
            request_id=item.rid,
            n=item.sampling.n,
            cache_key=item.cache_key,
            adapter=item.adapter,
            priority=item.priority,
            limit_name="max_new_tokens",
            timeout_s=self._timeout_s,
            continues_prompt=True,
            discards_output=item.sampling.max_new_tokens == 0,
            handoffs=handoffs,
        )
        param = "text" if isinstance(item.prompt, str) else "input_ids"
        sampling = _sampling(item)
        await self._service.check_grammar(sampling.grammar)
        return self._service.submit(token_ids, sampling, options, param=param)

    def _result(self, item: _Item, generation: Generation) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": item.rid,
            "finish_reason": _finish_reason(generation),
            "prompt_tokens": generation.num_prompt_tokens,
            "completion_tokens": len(generation.token_ids),
            "cached_tokens": generation.cached_tokens,
            "weight_version": generation.weight_version,
            "e2e_latency": generation.e2e_s,
        }
        if generation.speculation is not None:
            meta |= _speculation_fields(generation.speculation)
        if item.returns_logprobs:
            meta |= self._logprob_fields(item, generation)
        # A copy: the sequence grows while the event waits to be written.
        return {"text": generation.text, "output_ids": list(generation.token_ids), "meta_info": meta}

    def _logprob_fields(self, item: _Item, generation: Generation) -> dict[str, Any]:
        write, outputs = self._logprobs, generation.logprobs
        prompt = generation.request.prompt_token_ids
        inputs: list[Any] = []
        # If prefill has the request too, its answer says them, and a router puts the two lists together.
        if item.logprob_start >= 0 and not generation.is_told_to_both:
            prompt = prompt[item.logprob_start :]
            inputs = prompt_entries(generation.num_prompt_tokens, item.logprob_start, generation.prompt_logprobs)
        else:
            prompt = []
        fields: dict[str, Any] = {
            "input_token_logprobs": write.tokens(prompt, inputs),
            "output_token_logprobs": write.tokens(generation.token_ids, outputs),
        }
        if item.num_top > 0:
            fields["input_top_logprobs"] = write.top(inputs, item.num_top)
            fields["output_top_logprobs"] = write.top(outputs, item.num_top)
        if item.logprob_token_ids:
            fields["input_token_ids_logprobs"] = write.chosen(inputs)
            fields["output_token_ids_logprobs"] = write.chosen(outputs)
        return fields


def _speculation_fields(speculation: Speculation) -> dict[str, Any]:
    return {
        "spec_verify_ct": speculation.num_verifications,
        "spec_draft_token_num": speculation.num_drafts,
        "spec_accept_token_num": speculation.num_accepted,
        "spec_accept_length": speculation.accept_length,
        "spec_accept_rate": speculation.accept_rate,
    }


def _sampling(item: _Item) -> SamplingParams:
    return native_sampling(
        item.sampling,
        logprobs=item.num_top if item.returns_logprobs else None,
        logprob_start=item.logprob_start if item.returns_logprobs and item.logprob_start >= 0 else None,
        logprob_token_ids=item.logprob_token_ids if item.returns_logprobs else [],
    )


def _finish_reason(generation: Generation) -> dict[str, Any] | None:
    reason = generation.finish_reason
    if reason is None:
        return None
    if reason == "stop":
        return {"type": "stop", "matched": generation.matched_stop}
    if reason == "length":
        return {"type": "length", "length": generation.request.sampling.max_tokens}
    return {"type": str(reason), "message": "the request was aborted"}


def _items(body: GenerateRequest, header_id: str) -> tuple[list[_Item], bool]:
    """The prompts, and whether they came as a batch. Raises: RequestError if lists are not parallel."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids", param="text")
    prompts, is_batch = _text_prompts(body.text) if body.input_ids is None else _id_prompts(body.input_ids)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"the batch holds {len(prompts)} prompts; at most {MAX_PROMPTS} are accepted", param="text")
    count = len(prompts) if is_batch else None
    own_id = response_id("gen", header_id)
    spread = _Spread(count)
    rids = spread.values(body.rid, "rid", str, own_id, suffixes=True)
    samplings = spread.values(body.sampling_params, "sampling_params", dict, {})
    returns = spread.values(body.return_logprob, "return_logprob", bool, False)
    starts = spread.values(body.logprob_start_len, "logprob_start_len", int, -1)
    tops = spread.values(body.top_logprobs_num, "top_logprobs_num", int, 0)
    priorities = spread.values(body.priority, "priority", int, 0)
    keys = spread.values(body.extra_key, "extra_key", str, "")
    adapters = spread.values(body.lora_path or "", "lora_path", str, "")
    chosen = spread.lists(body.token_ids_logprob, "token_ids_logprob")
    items = [
        _Item(
            prompt=prompt,
            rid=rids[index],
            sampling=validated(NativeSampling, samplings[index], "sampling_params."),
            returns_logprobs=returns[index],
            logprob_start=starts[index],
            num_top=tops[index],
            logprob_token_ids=chosen[index],
            priority=_bounded_priority(priorities[index]),
            cache_key=keys[index],
            adapter=adapters[index],
        )
        for index, prompt in enumerate(prompts)
    ]
    return items, is_batch


def _bounded_priority(priority: int) -> int:
    if not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority must fit 32 bits, got {priority}", param="priority")
    return priority


def _text_prompts(value: object) -> tuple[list[str | list[int]], bool]:
    if isinstance(value, str):
        return [value], False
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value, True
    raise RequestError("text must be a string or a list of strings that is not empty", param="text")


def _id_prompts(value: object) -> tuple[list[str | list[int]], bool]:
    if isinstance(value, list) and value:
        return (value, True) if isinstance(value[0], list) else ([value], False)
    raise RequestError(
        "input_ids must be a list of token ids, or a list of such lists, and not empty", param="input_ids"
    )


class _Spread:
    """Spreads the values of a body over a batch: one for all, or a list with one each.

    Args: count: size of the batch; None: a single prompt, whose values are not lists.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count

    def values(self, value: object, name: str, kind: type, default: Any, *, suffixes: bool = False) -> list[Any]:
        """One value of type `kind` each. suffixes: one value for many must become different ones."""
        count = 1 if self._count is None else self._count
        if isinstance(value, list):
            if self._count is None and len(value) == 1:
                value = value * count
            if len(value) != count:
                raise RequestError(f"{name} has {len(value)} entries for {count} prompts", param=name)
            items = [default if item is None else item for item in value]
        else:
            single = default if value is None else value
            items = [f"{single}-{index}" for index in range(count)] if suffixes and count > 1 else [single] * count
        for item in items:
            if not isinstance(item, kind) or (kind is int and isinstance(item, bool)):
                raise RequestError(f"{name} must be of type {kind.__name__}, got {item!r:.80}", param=name)
        return items

    def lists(self, value: object, name: str) -> list[list[int]]:
        """One list of token ids each; a flat list is for all."""
        count = 1 if self._count is None else self._count
        if value is None:
            return [[] for _ in range(count)]
        if not isinstance(value, list):
            raise RequestError(f"{name} must be a list of token ids", param=name)
        if not any(isinstance(item, list) for item in value):
            value = [value] * count
        if len(value) != count:
            raise RequestError(f"{name} has {len(value)} lists for {count} prompts", param=name)
        lists = [[] if item is None else item for item in value]
        for item in lists:
            if not isinstance(item, list) or not set(map(type, item)) <= {int}:
                raise RequestError(f"{name} must hold token ids", param=name)
        return lists
