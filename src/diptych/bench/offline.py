"""Measures an engine inside this process: the same text side, engine loop and worker as `diptych.LLM`.

Everything here runs on the engine's event loop. Prompts are token ids before a round's clock starts; detokenizing is
measured, as it is part of every answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from diptych.bench.measure import Arrival, CaseResult, EngineTotals, RequestRecord, Round
from diptych.bench.workload import BenchRequest, Case, Conversation, Vocabulary, warmup_requests
from diptych.core.messages import EngineInfo
from diptych.core.request import SamplingParams
from diptych.errors import ConfigError, DiptychError, Unavailable
from diptych.server.chat import ChatTemplate, read_template
from diptych.server.generation import Generation, GenerationOptions, GenerationService

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 16
_FLUSH_ATTEMPTS = 200
_FLUSH_RETRY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """num_warmup: requests before each case that do not count. temperature, seed: of sampling; 0 is greedy."""

    num_warmup: int = 2
    temperature: float = 0.0
    seed: int = 0


def vocabulary_of(service: GenerationService) -> Vocabulary:
    """The token ids that random prompts for this engine may be made of."""
    size = min(service.info.vocab_size, service.tokenizer.vocab_size)
    return Vocabulary(size, service.tokenizer.special_ids)


def check_cases(cases: Sequence[Case], info: EngineInfo) -> None:
    """Raises: ConfigError if a case cannot run on this engine. Says in the log where it will not run as meant."""
    for case in cases:
        if case.max_len > info.max_model_len:
            raise ConfigError(
                f"{case.name} needs a context of {case.max_len} tokens, the engine has {info.max_model_len}; "
                "give a larger --max-model-len or --kv-cache-memory, or leave the case out with --cases"
            )
        if case.max_token_id >= info.vocab_size:
            raise ConfigError(
                f"{case.name} has token {case.max_token_id}, the model's vocabulary {info.vocab_size} tokens; "
                "leave the case out with --cases, or take a model with a larger vocabulary"
            )
        most = max(len(requests) for requests in case.rounds)
        if most > info.max_num_seqs:
            logger.info("%s: %d requests, at most %d in a batch (--max-num-seqs)", case.name, most, info.max_num_seqs)


async def measure_cases(service: GenerationService, cases: Sequence[Case], options: OfflineOptions) -> list[CaseResult]:
    """Run the cases one after the other. Raises: ConfigError if one cannot run; RequestError for a bad prompt."""
    check_cases(cases, service.info)
    results = []
    for case in cases:
        logger.info("%s: %d rounds of %d requests", case.name, len(case.rounds), len(case.rounds[0]))
        results.append(await measure_case(service, case, options))
    return results


async def measure_case(service: GenerationService, case: Case, options: OfflineOptions) -> CaseResult:
    """Warm up, then run every round on an empty prefix cache."""
    warmup = warmup_requests(case.rounds[0], options.num_warmup, max_tokens=WARMUP_TOKENS)
    if warmup:
        await measure_round(service, warmup, options)
    return CaseResult(case=case, rounds=tuple([await measure_round(service, item, options) for item in case.rounds]))


async def measure_round(service: GenerationService, requests: Sequence[BenchRequest], options: OfflineOptions) -> Round:
    """All requests at once; a request that the engine refuses is a record with an error."""
    template = _chat_template(service)
    prompts = [await _token_ids(service, request, template) for request in requests]
    await _flush_cache(service)
    before = EngineTotals.of(await service.client.load())
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _measure_request(service, prompt, sampling=_sampling(request, options, index), began=began)
            )
            for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
        ]
    records = tuple(task.result() for task in tasks)
    return Round(records=records, engine=EngineTotals.of(await service.client.load()).since(before))


def peak_rss_nbytes() -> int:
    """Most memory that this process has had resident at once, in bytes; the engine is a part of it."""
    # Imported here: the module exists on Unix alone, and this is the only thing that wants it.
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _sampling(request: BenchRequest, options: OfflineOptions, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=options.temperature,
        ignore_eos=True,
        seed=options.seed + index,
    )


def _chat_template(service: GenerationService) -> ChatTemplate:
    given = service.config.server.chat_template
    source = service.tokenizer.chat_template if given is None else read_template(given)
    return ChatTemplate(source, service.tokenizer.special_tokens)


async def _token_ids(service: GenerationService, request: BenchRequest, template: ChatTemplate) -> list[int]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return await service.encode(prompt)
    if isinstance(prompt, Conversation):
        rendered = template.render(prompt.messages)
        return await service.encode(rendered.text, add_special_tokens=rendered.add_special_tokens, param="messages")
    return prompt


async def _flush_cache(service: GenerationService) -> None:
    """Empty the prefix cache. The engine may still be ending what it has already answered: ask again, for a while."""
    for _ in range(_FLUSH_ATTEMPTS):
        reply = await service.client.flush_cache()
        if reply.ok:
            return
        await asyncio.sleep(_FLUSH_RETRY_S)
    raise Unavailable(f"the prefix cache cannot be emptied: {reply.message}")


async def _measure_request(
    service: GenerationService, prompt: list[int], *, sampling: SamplingParams, began: float
) -> RequestRecord:
    started_s = time.perf_counter() - began
    arrivals: list[Arrival] = []
    generation: Generation | None = None
    error: str | None = None
    try:
        (generation,) = service.submit(prompt, sampling, GenerationOptions())
        async with aclosing(generation.stream()) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    arrivals.append(Arrival(time.perf_counter() - began, len(chunk.token_ids)))
    except DiptychError as failure:
        logger.debug("a request failed: %s", failure)
        error = failure.code
    return RequestRecord(
        started_s=started_s,
        ended_s=arrivals[-1].at_s if arrivals and error is None else time.perf_counter() - began,
        num_prompt_tokens=len(prompt),
        num_output_tokens=sum(arrival.num_tokens for arrival in arrivals),
        cached_tokens=0 if generation is None else generation.cached_tokens,
        arrivals=tuple(arrivals),
        queue_s=None if generation is None else generation.queue_s,
        error=error,
    )
