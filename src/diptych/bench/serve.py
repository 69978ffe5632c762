"""Measures a running server over HTTP: /v1/completions, or /v1/chat/completions for conversations, as streams.

Any OpenAI-compatible server will do that takes token ids and `ignore_eos`; of Diptych's it also reads the engine's
counters. A request that fails is counted with its cause and ends nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from diptych.bench.measure import Arrival, CaseResult, EngineTotals, RequestRecord, Round
from diptych.bench.workload import BenchRequest, Case, Conversation, Vocabulary, warmup_requests
from diptych.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 16
_MAX_CAUSE_CHARS = 120
_COUNTERS = (  # in the order of EngineTotals; any prefix, so that every --metrics-prefix is understood
    ("engine_steps",),
    ("engine_host_seconds",),
    ("engine_compute_seconds",),
    ("prompt_tokens",),
    ("prompt_tokens_cached", "cached_tokens"),
    ("generation_tokens",),
    ("num_preemptions", "num_retracted_reqs"),
    ("spec_decode_num_drafts", "spec_verify_calls"),
    ("spec_decode_num_draft_tokens", "spec_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "spec_accepted_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How a server is loaded.

    url: of the server, without /v1. model: name in the requests. concurrency: requests open at once at most.
    request_rate: arrivals a second, a Poisson process drawn with `seed`. Neither: all at once. timeout_s: for a whole
    request. extra: fields that every body gets besides.
    """

    url: str
    model: str = ""
    api_key: str | None = None
    concurrency: int | None = None
    request_rate: float | None = None
    num_warmup: int = 2
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise ConfigError(f"--url must be such as http://127.0.0.1:30000, got {self.url!r}")
        if self.concurrency is not None and self.request_rate is not None:
            raise ConfigError("--concurrency and --request-rate exclude each other; give one")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency must be at least 1, got {self.concurrency}")
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise ConfigError(f"--request-rate must be above 0, got {self.request_rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDescription:
    """What a server says of itself; None where it does not. models: the names it serves."""

    models: tuple[str, ...]
    vocab_size: int | None = None
    version: str | None = None
    settings: dict[str, Any] | None = None


class RequestFailure(Exception):
    """One request failed; the text is its cause, the same for failures of the same kind."""


@asynccontextmanager
async def open_session(options: ServeOptions) -> AsyncIterator[aiohttp.ClientSession]:
    """A client with as many connections as are wanted, to `options.url`."""
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    async with aiohttp.ClientSession(
        options.url.rstrip("/") + "/",
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=options.timeout_s),
    ) as session:
        yield session


async def describe_server(session: aiohttp.ClientSession) -> ServerDescription:
    """Ask a server what it is. Raises: Unavailable if nothing that lists models answers."""
    try:
        async with session.get("v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise Unavailable(f"{response.url} answers {response.status}: {body[:200].decode(errors='replace')}")
            models = tuple(str(model["id"]) for model in orjson.loads(body)["data"])
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise Unavailable(f"no server answers: {type(error).__name__}: {error}; is --url right?") from error
    info = await _get_object(session, "model_info")
    settings = await _get_object(session, "server_info")
    vocab_size = info.get("vocab_size")
    return ServerDescription(
        models=models,
        vocab_size=vocab_size if isinstance(vocab_size, int) else None,
        version=str(settings["version"]) if "version" in settings else None,
        settings=settings or None,
    )


async def _get_object(session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    """The JSON object at a path; empty if the server has none there."""
    try:
        async with session.get(path) as response:
            content = orjson.loads(await response.read()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def vocabulary_of(server: ServerDescription, vocab_size: int | None) -> Vocabulary:
    """The token ids for random prompts. Raises: ConfigError if the size is known from nowhere."""
    size = server.vocab_size if vocab_size is None else vocab_size
    if size is None:
        raise ConfigError("the server does not say how large its vocabulary is; give --vocab-size, or --dataset")
    return Vocabulary(size)


async def measure_cases(
    session: aiohttp.ClientSession, cases: Sequence[Case], options: ServeOptions
) -> list[CaseResult]:
    """Run the cases one after the other."""
    results = []
    for case in cases:
        logger.info("%s: %d rounds of %d requests", case.name, len(case.rounds), len(case.rounds[0]))
        warmup = warmup_requests(case.rounds[0], options.num_warmup, max_tokens=WARMUP_TOKENS)
        # What fails here fails again when it counts, and is reported then.
        await asyncio.gather(
            *(measure_request(session, request, options=options, began=time.perf_counter()) for request in warmup)
        )
        rounds = tuple([await measure_round(session, requests, options) for requests in case.rounds])
        results.append(CaseResult(case=case, rounds=rounds))
    return results


async def measure_round(
    session: aiohttp.ClientSession, requests: Sequence[BenchRequest], options: ServeOptions
) -> Round:
    """Send the requests as `options` says and wait for all."""
    before = await _engine_totals(session)
    began = time.perf_counter()
    places = asyncio.Semaphore(options.concurrency or len(requests))
    due = arrival_times(len(requests), options.request_rate, seed=options.seed)

    async def measure(request: BenchRequest, due_s: float) -> RequestRecord:
        # A request counts from when it was due, so that a client that falls behind does not flatter the server.
        await asyncio.sleep(began + due_s - time.perf_counter())
        async with places:
            started_s = due_s if options.request_rate is not None else time.perf_counter() - began
            return await measure_request(session, request, options=options, began=began, started_s=started_s)

    records = await asyncio.gather(*map(measure, requests, due))
    after = await _engine_totals(session)
    return Round(records=tuple(records), engine=None if before is None or after is None else after.since(before))


def arrival_times(count: int, rate: float | None, *, seed: int) -> list[float]:
    """When each request is due, in seconds: a Poisson process of `rate` a second from 0 on; None is all at 0."""
    if rate is None:
        return [0.0] * count
    source = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + source.expovariate(rate))
    return times[:count]


class _Stream:
    """What a response's events add up to."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.arrivals: list[Arrival] = []
        self.usage: dict[str, Any] = {}
        self.is_done = False

    def read_line(self, line: bytes) -> None:
        """Take one line of the stream. Raises: RequestFailure if it reports an error."""
        if not line.startswith(b"data:"):
            return
        content = line[5:].strip()
        if content == b"[DONE]":
            self.is_done = True
            return
        event = orjson.loads(content)
        if "error" in event:
            raise RequestFailure(f"in the stream: {_cause(event)}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            if num_tokens := _num_tokens(choice):
                self.arrivals.append(Arrival(time.perf_counter() - self._began, num_tokens))

    @property
    def num_output_tokens(self) -> int:
        """As the server counts them, or as many as were seen."""
        seen = sum(arrival.num_tokens for arrival in self.arrivals)
        return int(self.usage.get("completion_tokens", seen))


def _num_tokens(choice: dict[str, Any]) -> int:
    """New tokens in an event: those it lists, else one if it has text."""
    token_ids = choice.get("token_ids")
    if token_ids is not None:
        return len(token_ids)
    return 1 if choice.get("text") or choice.get("delta", {}).get("content") else 0


async def measure_request(
    session: aiohttp.ClientSession,
    request: BenchRequest,
    *,
    options: ServeOptions,
    began: float,
    started_s: float = 0.0,
) -> RequestRecord:
    """Send one request and follow its stream; a failure is part of the record.

    began: `time.perf_counter()` at the start of the clock that the record's times count from.
    """
    stream = _Stream(began)
    error: str | None = None
    try:
        await _receive(session, request, options, stream)
    except RequestFailure as failure:
        error = str(failure)
    except TimeoutError:
        error = f"timed out after {options.timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"[:_MAX_CAUSE_CHARS]
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as failure:
        error = f"unreadable answer: {type(failure).__name__}"
    prompt = request.prompt
    known_len = len(prompt) if isinstance(prompt, list) else 0
    details = stream.usage.get("prompt_tokens_details") or {}
    return RequestRecord(
        started_s=started_s,
        ended_s=stream.arrivals[-1].at_s if stream.arrivals and error is None else time.perf_counter() - began,
        num_prompt_tokens=int(stream.usage.get("prompt_tokens", known_len)),
        num_output_tokens=stream.num_output_tokens,
        cached_tokens=int(details.get("cached_tokens") or 0),
        arrivals=tuple(stream.arrivals),
        error=error,
    )


async def _receive(
    session: aiohttp.ClientSession, request: BenchRequest, options: ServeOptions, stream: _Stream
) -> None:
    path, body = _http_request(request, options)
    async with session.post(path, data=orjson.dumps(body), headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            raise RequestFailure(f"HTTP {response.status}: {_cause(_parse(await response.read()))}")
        async for line in response.content:
            stream.read_line(line)
    if not stream.is_done:
        raise RequestFailure("the stream broke off")
    if not stream.arrivals:
        raise RequestFailure("the answer is empty")


def _http_request(request: BenchRequest, options: ServeOptions) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": request.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Without the ids, a token that completes no character would make no event, and so no arrival.
        "return_token_ids": True,
        **options.extra,
    }
    if isinstance(request.prompt, Conversation):
        return "v1/chat/completions", {**body, "messages": request.prompt.messages}
    return "v1/completions", {**body, "prompt": request.prompt}


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def _cause(body: Any) -> str:
    """Code or type of an error body, and its message with numbers left out, so that like causes count as one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = f"{error.get('code') or error.get('type') or 'error'}: {error.get('message', '')}"
    return re.sub(r"\d+", "N", str(error))[:_MAX_CAUSE_CHARS]


async def _engine_totals(session: aiohttp.ClientSession) -> EngineTotals | None:
    """The engine's counters, if the server is a Diptych."""
    try:
        async with session.get("metrics") as response:
            return parse_engine_totals(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


def parse_engine_totals(text: str) -> EngineTotals | None:
    """The engine's counters in a metrics page; None if some are not there."""
    values = {
        match[1]: float(match[2]) for match in re.finditer(r"^\w+:(\w+?)_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    }
    found = [next((values[name] for name in names if name in values), None) for names in _COUNTERS]
    known = [value for value in found if value is not None]
    return EngineTotals(*known) if len(known) == len(_COUNTERS) else None
