"""Measuring a server: Diptych's own on the toy engine, and fakes that fail in every way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from diptych.bench.serve import (
    ServeOptions,
    arrival_times,
    describe_server,
    measure_cases,
    measure_round,
    open_session,
    parse_engine_totals,
    vocabulary_of,
)
from diptych.bench.workload import BenchRequest, Case, Conversation, LengthRange, SyntheticSpec, synthetic_requests
from diptych.errors import ConfigError, Unavailable


async def test_a_diptych_server(toy_url):
    options = ServeOptions(url=toy_url, model="toy", concurrency=3)
    async with open_session(options) as session:
        server = await describe_server(session)
        assert (server.models, server.vocab_size) == (("toy",), 258)
        spec = SyntheticSpec(num_prompts=8, input_len=LengthRange(8, 20), output_len=LengthRange(3, 9))
        requests = synthetic_requests(spec, vocabulary_of(server, None))
        (result,) = await measure_cases(session, [Case(name="toy", rounds=(requests,))], options)
    (measured,) = result.rounds
    assert not measured.failures
    for record, request in zip(measured.records, requests, strict=True):
        assert (record.num_prompt_tokens, record.num_output_tokens) == (len(request.prompt), request.max_tokens)
        # Tokens that complete no character arrive too.
        assert sum(arrival.num_tokens for arrival in record.arrivals) == request.max_tokens
    assert measured.engine.generation_tokens == measured.num_output_tokens


async def test_texts_and_conversations(toy_url):
    options = ServeOptions(url=toy_url + "/", model="toy", request_rate=200.0)
    conversation = Conversation([{"role": "user", "content": "hello"}])
    async with open_session(options) as session:
        measured = await measure_round(session, [BenchRequest("text", 3), BenchRequest(conversation, 4)], options)
    assert not measured.failures
    assert [record.num_output_tokens for record in measured.records] == [3, 4]
    due = arrival_times(2, 200.0, seed=0)
    assert [record.started_s for record in measured.records] == due


@asynccontextmanager
async def fake_server(complete: Callable) -> AsyncIterator[str]:
    """A server whose /v1/completions is `complete`; it lists a model and nothing else."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await web.SockSite(runner, listener).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        await runner.cleanup()


async def failures_of(complete: Callable, count: int = 3, **options: float) -> dict[str, int]:
    async with fake_server(complete) as url:
        made = ServeOptions(url=url, model="fake", **options)
        async with open_session(made) as session:
            measured = await measure_round(session, [BenchRequest([1, 2], 4)] * count, made)
    assert measured.engine is None
    return dict(measured.failures)


async def send_lines(request: web.Request, *lines: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for line in lines:
        await response.write(line + b"\n\n")
    return response


TOKEN = b'data: {"choices": [{"index": 0, "text": "a"}]}'


async def test_other_servers_need_only_text_and_done():
    async def complete(request: web.Request) -> web.StreamResponse:
        return await send_lines(request, b": comment", TOKEN, TOKEN, b"data: [DONE]")

    async with fake_server(complete) as url:
        options = ServeOptions(url=url, model="fake")
        async with open_session(options) as session:
            assert (await describe_server(session)).vocab_size is None
            measured = await measure_round(session, [BenchRequest([1, 2, 3], 2)], options)
    (record,) = measured.records
    assert (record.error, record.num_prompt_tokens, record.num_output_tokens) == (None, 3, 2)


async def test_refusals_of_one_kind_are_one_cause():
    numbers = iter(range(10, 100))

    async def complete(request: web.Request) -> web.StreamResponse:
        body = {"error": {"code": "overloaded", "message": f"{next(numbers)} requests wait"}}
        return web.json_response(body, status=503)

    assert await failures_of(complete) == {"HTTP 503: overloaded: N requests wait": 3}


async def test_refusals_without_json():
    async def complete(request: web.Request) -> web.StreamResponse:
        return web.Response(text="bad gateway", status=502)

    assert await failures_of(complete) == {"HTTP 502: bad gateway": 3}


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ((TOKEN,), "the stream broke off"),
        ((b"data: [DONE]",), "the answer is empty"),
        ((b"data: {",), "unreadable answer: JSONDecodeError"),
        ((TOKEN, b'data: {"error": {"message": "died"}}'), "in the stream: error: died"),
    ],
)
async def test_streams_that_go_wrong(lines, cause):
    async def complete(request: web.Request) -> web.StreamResponse:
        return await send_lines(request, *lines)

    assert await failures_of(complete) == {cause: 3}


async def test_slow_answers_time_out():
    async def complete(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    assert await failures_of(complete, timeout_s=0.05) == {"timed out after 0.05 s": 3}


async def test_concurrency_is_a_limit():
    open_now, most = 0, 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.05)
        open_now -= 1
        return await send_lines(request, TOKEN, b"data: [DONE]")

    assert await failures_of(complete, count=12, concurrency=3) == {}
    assert most == 3


async def test_no_server_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with open_session(ServeOptions(url=f"http://127.0.0.1:{port}")) as session:
        with pytest.raises(Unavailable, match="is --url right"):
            await describe_server(session)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:30000"}, "--url must be such as"),
        ({"concurrency": 2, "request_rate": 1.0}, "exclude each other"),
        ({"concurrency": 0}, "--concurrency must be at least 1"),
        ({"request_rate": 0.0}, "--request-rate must be above 0"),
        ({"request_rate": float("nan")}, "--request-rate must be above 0"),
    ],
)
def test_bad_options(fields, message):
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**{"url": "http://127.0.0.1:1", **fields})


def test_arrivals_are_a_seeded_poisson_process():
    times = arrival_times(4000, 50.0, seed=1)
    assert times == arrival_times(4000, 50.0, seed=1) != arrival_times(4000, 50.0, seed=2)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 50.0, rel=0.1)
    assert arrival_times(2, None, seed=0) == [0.0, 0.0]


@pytest.mark.parametrize("family", ["vllm", "sglang", "diptych"])
def test_engine_totals_under_every_family_of_names(family):
    from diptych.core.messages import EngineLoad
    from diptych.metrics import ServerMetrics

    metrics = ServerMetrics(family, "toy")
    metrics.note_load(EngineLoad(timestamp=0.0, steps_total=4, host_s_total=0.5, cached_tokens_total=7))
    totals = parse_engine_totals(metrics.render()[0].decode())
    assert (totals.steps, totals.host_s, totals.cached_tokens) == (4, 0.5, 7)
    assert parse_engine_totals("vllm:prompt_tokens_total 3.0\n") is None
