"""From tokens to text and back: what every generating route needs, whatever its dialect.

Owns tokenizing off the event loop, fitting a request into the context, seeds and fan-out, detokenizing with stop
strings, timing, and the log line of a finished sequence. Knows nothing of HTTP bodies.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from diptych.config import EngineConfig
from diptych.core.batch import FinishReason, Speculation, TokenLogprobs
from diptych.core.messages import EngineInfo, RequestOutput
from diptych.core.request import MAX_SEED, Grammar, HandTo, Request, SamplingParams, TakeFrom
from diptych.errors import DiptychError, PromptTooLong, RequestError
from diptych.metrics import RequestTimes, ServerMetrics
from diptych.sampling.grammar_check import validate_grammar
from diptych.server.adapters import ServedAdapters
from diptych.server.client import EngineClient
from diptych.server.detokenizer import OutputText
from diptych.server.matchmaker import Matchmaker
from diptych.server.token_texts import TokenTexts
from diptych.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Shorter texts are tokenized faster than a thread could be woken for them.
_INLINE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one output added to a sequence. `text` may be empty while a character or a stop string is incomplete."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What belongs to a request beside its prompt and sampling.

    request_id: the client's name for it; empty makes one. n: sequences. default_max_tokens: if sampling names no limit;
    None is all that the context holds. limit_name: what the client calls max_tokens. timeout_s: from now.
    adapter: name of the one to use, "" for the base model. continues_prompt: the output's text goes on where the
    prompt's ends. discards_output: only the prompt's logprobs are wanted. handoffs: for each
    sequence what another engine has to do with it; empty: nothing.
    """

    request_id: str = ""
    n: int = 1
    cache_key: str = ""
    adapter: str = ""
    priority: int = 0
    timeout_s: float | None = None
    default_max_tokens: int | None = None
    limit_name: str = "max_tokens"
    continues_prompt: bool = False
    discards_output: bool = False
    handoffs: Sequence[HandTo | TakeFrom | None] = ()


class Generation:
    """One sequence: its request, and what has come out so far."""

    def __init__(self, service: GenerationService, request: Request, options: GenerationOptions, *, index: int) -> None:
        self.request = request
        self.public_id = options.request_id
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.matched_stop: int | str | None = None
        self.queue_s: float | None = None
        self.speculation: Speculation | None = None
        self.weight_version = service.info.weight_version
        self._service = service
        self._discards_output = options.discards_output
        context = request.prompt_token_ids if options.continues_prompt else ()
        self._output_text = OutputText(service.tokenizer, _read_for(request), prompt_token_ids=context)
        self._started = time.perf_counter()
        self._last_output: float | None = None
        self._ttft_s: float | None = None

    @property
    def is_told_to_both(self) -> bool:
        """Whether the engine that computes the prompt has the request from its client, and answers it too."""
        handoff = self.request.handoff
        return isinstance(handoff, TakeFrom) and handoff.room is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def e2e_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._started

    async def stream(self) -> AsyncGenerator[Chunk, None]:
        """Chunks until the sequence ends. Closing early aborts it. Raises: what the engine refuses it with."""
        self._service.note_start(self)
        outcome = "abort"
        try:
            async with aclosing(self._service.client.generate(self.request)) as outputs:
                async for output in outputs:
                    chunk = self._absorb(output)
                    if chunk is None:
                        continue
                    yield chunk
                    if chunk.is_last:
                        break
            outcome = str(self.finish_reason)
        except DiptychError as error:
            outcome = error.code
            raise
        finally:
            self._service.note_end(self, outcome, self._ttft_s)

    async def run(self) -> None:
        """Generate to the end; the result is in the attributes."""
        async with aclosing(self.stream()) as chunks:
            async for _ in chunks:
                pass

    def _absorb(self, output: RequestOutput) -> Chunk | None:
        """Take over an output; None if it only brought logprobs of the prompt."""
        if output.finish_reason is FinishReason.ERROR:
            raise DiptychError("the engine could not compute this request; its log has details")
        if output.queue_s is not None:
            self.queue_s = output.queue_s
        self.speculation = output.speculation
        self.weight_version = output.weight_version or self.weight_version
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.prompt_logprobs += output.prompt_logprobs
        if not output.token_ids and output.finish_reason is None:
            return None
        is_first = self._last_output is None
        if output.token_ids:
            self._note_time()
        self.finish_reason, self.matched_stop = output.finish_reason, output.matched_stop
        if self._discards_output:
            return Chunk("", [], [], is_first, output.finish_reason is not None)
        text, num_tokens = self._detokenize(output)
        token_ids, logprobs = output.token_ids[:num_tokens], output.logprobs[:num_tokens]
        self.text += text
        self.token_ids += token_ids
        self.logprobs += logprobs
        return Chunk(text, token_ids, logprobs, is_first, self.finish_reason is not None)

    def _detokenize(self, output: RequestOutput) -> tuple[str, int]:
        """New text, and how many of the output's tokens belong to the sequence: those up to a stop string."""
        token_ids = output.token_ids
        if output.matched_stop is not None and not self.request.sampling.include_stop_text:
            token_ids = token_ids[:-1]
        piece = self._output_text.add(token_ids, output.finish_reason is not None)
        if piece.matched_stop is None:
            return piece.text, len(output.token_ids)
        self.finish_reason, self.matched_stop = FinishReason.STOP, piece.matched_stop
        return piece.text, piece.num_tokens

    def _note_time(self) -> None:
        now = time.perf_counter()
        if self._last_output is None:
            self._ttft_s = now - self._started
        else:
            self._service.metrics.note_gap(now - self._last_output)
        self._last_output = now


@dataclass
class GenerationService:
    """Makes generations for one engine and model.

    Its engine must be ready: `info` is what it said last.
    """

    client: EngineClient
    info: EngineInfo
    tokenizer: Tokenizer
    token_texts: TokenTexts
    metrics: ServerMetrics
    config: EngineConfig
    matchmaker: Matchmaker = field(default_factory=Matchmaker)
    served_adapters: ServedAdapters | None = None
    _ids: dict[str, set[str]] = field(default_factory=dict)
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.adapters = (
            ServedAdapters(self.client, self.config) if self.served_adapters is None else self.served_adapters
        )
        self._seeds = random.Random(self.config.model.seed)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text. Raises: PromptTooLong at once for a text that cannot fit however it is cut up."""
        fewest = -(-len(text) // self.token_texts.max_token_chars)
        if fewest > self.info.max_model_len:
            raise self._too_long(f"at least {fewest}", param)
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Of a batch, the tokenizer lets go of the interpreter while it works.
        encode = partial(self.tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens)
        return (await asyncio.get_running_loop().run_in_executor(self._threads, encode))[0]

    async def check_grammar(self, grammar: Grammar | None) -> None:
        """Raises: RequestError if it cannot be compiled, so that the client hears of it before anything is queued."""
        if grammar is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, validate_grammar, grammar)

    def check_token_ids(self, value: object, param: str) -> list[int]:
        """`value` as token ids. Raises: RequestError unless it is a list of integers of the vocabulary."""
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise RequestError(f"{param} must be a list of token ids", param=param)
        if value and not (min(value) >= 0 and max(value) < self.info.vocab_size):
            wrong = min(value) if min(value) < 0 else max(value)
            raise RequestError(
                f"{param} holds {wrong}, but token ids go from 0 to {self.info.vocab_size - 1}", param=param
            )
        return value

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        options: GenerationOptions,
        *,
        param: str = "prompt",
    ) -> list[Generation]:
        """The `n` sequences to generate for a prompt; each starts when it is iterated.

        Raises: RequestError if prompt or limits do not fit, naming `param` where the prompt is at fault.
        """
        if not prompt_token_ids:
            raise RequestError(f"{param} is empty", param=param)
        self.adapters.check(options.adapter)
        sampling = self._fit(len(prompt_token_ids), sampling, options, param)
        self._check_tokens_of(sampling)
        if not options.request_id:
            options = replace(options, request_id=uuid.uuid4().hex)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        timeout_s = options.timeout_s or self.config.scheduler.request_timeout
        now = time.time()
        generations = []
        for index in range(options.n):
            request = Request(
                request_id=f"{options.request_id}-{next(self._serial)}",
                prompt_token_ids=prompt_token_ids,
                sampling=msgspec.structs.replace(sampling, seed=_wrap_seed(seed + index)),
                cache_key=options.cache_key,
                adapter=options.adapter,
                priority=options.priority,
                arrival_time=now,
                deadline=None if timeout_s is None else now + timeout_s,
                handoff=options.handoffs[index] if options.handoffs else None,
            )
            generations.append(Generation(self, request, options, index=index))
        return generations

    def abort(self, public_ids: Sequence[str]) -> None:
        """Stop every open sequence of these requests; unknown ids are ignored."""
        request_ids = [request_id for public_id in public_ids for request_id in self._ids.get(public_id, ())]
        if request_ids:
            self.client.abort(request_ids)

    def note_start(self, generation: Generation) -> None:
        """A sequence goes to the engine."""
        self._ids.setdefault(generation.public_id, set()).add(generation.request.request_id)

    def note_end(self, generation: Generation, outcome: str, ttft_s: float | None) -> None:
        """A sequence has ended: count it, and say so in the log."""
        siblings = self._ids[generation.public_id]
        siblings.discard(generation.request.request_id)
        if not siblings:
            del self._ids[generation.public_id]
        times = RequestTimes(
            num_prompt_tokens=generation.num_prompt_tokens,
            num_output_tokens=len(generation.token_ids),
            e2e_s=generation.e2e_s,
            ttft_s=ttft_s,
            queue_s=generation.queue_s,
            finish_reason=outcome,
        )
        self.metrics.note_finished(times)
        if self.config.server.log_requests:
            _log_end(generation, times)

    def close(self) -> None:
        """Release the tokenizer's threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fit(self, num_prompt: int, sampling: SamplingParams, options: GenerationOptions, param: str) -> SamplingParams:
        room = self.info.max_model_len - num_prompt
        if room < 1:
            raise self._too_long(str(num_prompt), param)
        if options.discards_output:
            return msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0)
        limit = sampling.max_tokens
        if limit is not None and limit > room:
            raise PromptTooLong(
                f"{options.limit_name} ({limit}) and the prompt ({num_prompt} tokens) exceed the context of "
                f"{self.info.max_model_len} tokens; ask for at most {room}",
                param=options.limit_name,
            )
        if limit is None:
            limit = room if options.default_max_tokens is None else max(options.default_max_tokens, sampling.min_tokens)
        return msgspec.structs.replace(sampling, max_tokens=min(limit, room))

    def _too_long(self, num_prompt: str, param: str) -> PromptTooLong:
        return PromptTooLong(
            f"the prompt has {num_prompt} tokens, but the context of {self.info.max_model_len} tokens holds "
            f"{self.info.max_model_len - 1} beside one token of output",
            param=param,
        )

    def _check_tokens_of(self, sampling: SamplingParams) -> None:
        self.check_token_ids(list(sampling.stop_token_ids), "stop_token_ids")
        self.check_token_ids(list(sampling.logit_bias), "logit_bias")
        self.check_token_ids(list(sampling.logprob_token_ids), "token_ids_logprob")
        for token_id, bias in sampling.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias of token {token_id} must be between -100 and 100, got {bias}", "logit_bias"
                )


async def run_all(generations: Sequence[Generation]) -> None:
    """Generate all to the end, together. The first error aborts the others and is raised."""
    if len(generations) == 1:
        await generations[0].run()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for generation in generations:
                group.create_task(generation.run())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def stream_all(generations: Sequence[Generation]) -> AsyncGenerator[tuple[Generation, Chunk], None]:
    """Chunks of all as they come. The first error aborts the others and is raised."""
    if len(generations) == 1:
        async with aclosing(generations[0].stream()) as chunks:
            async for chunk in chunks:
                yield generations[0], chunk
        return
    arrivals: asyncio.Queue[tuple[Generation, Chunk | BaseException | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(generation, arrivals)) for generation in generations]
    try:
        remaining = len(tasks)
        while remaining:
            generation, item = await arrivals.get()
            if isinstance(item, Chunk):
                yield generation, item
            elif item is None:
                remaining -= 1
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(generation: Generation, arrivals: asyncio.Queue[Any]) -> None:
    """Put each chunk, then None, or the error that ended it."""
    try:
        async with aclosing(generation.stream()) as chunks:
            async for chunk in chunks:
                arrivals.put_nowait((generation, chunk))
    except Exception as error:
        arrivals.put_nowait((generation, error))
    else:
        arrivals.put_nowait((generation, None))


def _read_for(request: Request) -> SamplingParams:
    """How the output is read. A stop string must not end a sequence whose pages are still on their way elsewhere."""
    if isinstance(request.handoff, HandTo):
        return msgspec.structs.replace(request.sampling, stop=())
    return request.sampling


def _wrap_seed(seed: int) -> int:
    """Back into the range of a 64-bit signed integer."""
    return (seed + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


def _log_end(generation: Generation, times: RequestTimes) -> None:
    logger.info(
        "%s%s: %d prompt (%d cached) + %d output tokens, queue %.3f s, first token %.3f s, total %.3f s",
        times.finish_reason,
        _other_engine(generation.request.handoff),
        times.num_prompt_tokens,
        generation.cached_tokens,
        times.num_output_tokens,
        times.queue_s or 0.0,
        times.ttft_s or 0.0,
        times.e2e_s,
        extra={"request_id": generation.public_id},
    )


def _other_engine(handoff: HandTo | TakeFrom | None) -> str:
    """Who else took part, for the log."""
    match handoff:
        case HandTo(room=room):
            return f", handed over in room {room}"
        case TakeFrom(address=address, room=None):
            return f", prefill by {address}"
        case TakeFrom(address=address, room=room):
            return f", prefill by {address} in room {room}"
    return ""
