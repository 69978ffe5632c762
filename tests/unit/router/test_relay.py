"""Requests through a router to scripted engines: choice, retries, deaths, disconnects, overload."""

from __future__ import annotations

import asyncio
import time

import httpx
import orjson
import pytest
from starlette.responses import JSONResponse, Response

from diptych.router.config import Role
from diptych.router.member import State

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


async def failing(request, body):
    return JSONResponse({"error": {"message": "boom"}}, 500)


async def full(request, body):
    return Response(b'{"error":{"message":"full"}}', 503, {"Retry-After": "7"})


def events_of(text: bytes) -> list[bytes]:
    assert text.endswith(b"\n\n")
    return text.split(b"\n\n")[:-1]


async def test_a_pair_is_told_to_decode_alone(engine_of, route_to):
    prefill, decode = await engine_of("prefill", bootstrap_port=9123), await engine_of("decode")
    async with route_to(prefill, decode) as router:
        answer = await router.http.post(
            "/v1/chat/completions", json={**CHAT, "bootstrap_room": 7, "bootstrap_host": "x"}
        )
    assert answer.json() == {"from": decode.url}
    assert prefill.asked == []
    assert decode.asked == [{**CHAT, "bootstrap_host": "127.0.0.1", "bootstrap_port": 9123}]


async def test_the_bootstrap_port_has_a_default(engine_of, route_to):
    prefill, decode = await engine_of("prefill"), await engine_of("decode")
    async with route_to(prefill, decode) as router:
        await router.http.post("/generate", json={})
    assert decode.asked == [{"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}]


async def test_unified_engines_get_the_body_as_it_is(engine_of, route_to):
    engine = await engine_of()
    received = []

    async def keep(request, body):
        received.append(await request.body())
        return JSONResponse({})

    engine.script = keep
    text = b'{ "prompt" : [1,2 ],\n"seed":1e400, "x": 123456789012345678901234567890 }'.replace(b"1e400", b"4")
    async with route_to(engine) as router:
        await router.http.put("/generate?a=b%20c", content=text)
    assert received == [text]


async def test_short_prompts_stay_on_decode(engine_of, route_to):
    prefill, decode = await engine_of("prefill"), await engine_of("decode")
    async with route_to(prefill, decode, local_prefill_tokens=100) as router:
        await router.http.post("/generate", json={"input_ids": list(range(99))})
        await router.http.post("/generate", json={"input_ids": list(range(1000, 1100))})
        assert ["bootstrap_host" in body for body in decode.asked] == [False, True]
        long = {"text": "once upon a time " * 200}
        await router.http.post("/generate", json=long)
        await router.http.post("/generate", json={"text": long["text"] + "there was"})  # decode has most of it now
    assert ["bootstrap_host" in body for body in decode.asked] == [False, True, True, False]


async def test_streams_pass_and_carry_one_identity(engine_of, route_to):
    engine = await engine_of()
    trace = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    async with route_to(engine) as router:
        sent = {"X-Request-ID": "mine", "traceparent": trace, "tracestate": "a=b", "X-Override-Rid": "z"}
        answer = await router.http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=sent)
        fresh = await router.http.post("/v1/completions", json={"prompt": "a"})
    assert answer.content == b'data: {"n":0}\n\ndata: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'
    assert answer.headers["x-request-id"] == "mine"
    assert engine.headers[0]["x-request-id"] == "mine"
    assert (engine.headers[0]["traceparent"], engine.headers[0]["tracestate"]) == (trace, "a=b")
    assert "x-override-rid" not in engine.headers[0]
    assert engine.headers[1]["x-request-id"] == fresh.headers["x-request-id"]
    assert engine.headers[1]["traceparent"].startswith(f"00-{fresh.headers['x-request-id']}-")


@pytest.mark.parametrize(("script", "reason"), [(failing, "failed"), (full, "refused")])
async def test_a_failed_attempt_goes_elsewhere(engine_of, route_to, script, reason):
    bad, good = await engine_of(), await engine_of()
    bad.script = script
    async with route_to(bad, good, policy="round_robin") as router:
        answers = [await router.http.post("/v1/chat/completions", json=CHAT) for _ in range(2)]
        metrics = (await router.http.get("/metrics")).text
    assert [answer.json() for answer in answers] == [{"from": good.url}] * 2
    assert len(bad.asked) >= 1
    assert f'diptych_router_retries_total{{reason="{reason}"}} 1.0' in metrics
    assert f'diptych_router_requests_total{{engine="{bad.url}",outcome="{reason}"}} 1.0' in metrics


async def test_an_engine_that_is_gone_costs_nothing_but_a_moment(engine_of, route_to):
    gone, good = await engine_of(), await engine_of()
    async with route_to(gone, good, policy="round_robin", health_interval=30.0) as router:
        await gone.stop()
        started = time.monotonic()
        answers = [await router.http.post("/v1/chat/completions", json=CHAT) for _ in range(4)]
        assert time.monotonic() - started < 1.0
        assert {answer.json()["from"] for answer in answers} == {good.url}
        await router.until(lambda: router.states()[gone.url] is State.DOWN)  # the failed request made it look at once


async def test_an_engine_that_dies_before_its_first_event_is_replaced(engine_of, route_to, stream):
    bad, good = await engine_of(), await engine_of()

    async def die(request, body):
        return stream([b'data: {"half'], dies=True)

    bad.script = die
    async with route_to(bad, good, policy="round_robin") as router:
        answers = [await router.http.post("/v1/chat/completions", json={**CHAT, "stream": True}) for _ in range(2)]
    assert len(bad.asked) == 1
    assert all(events_of(answer.content)[-1] == b"data: [DONE]" for answer in answers)
    assert all(b"error" not in answer.content for answer in answers)


async def test_death_in_a_stream_is_an_error_event_after_whole_events(engine_of, route_to, stream):
    bad, good = await engine_of(), await engine_of("decode")

    async def die(request, body):
        return stream([b'data: {"n":0}\n\ndata: {"n"', b":1}\n", b'\ndata: {"n":'], dies=True)

    bad.script = die
    async with route_to(bad, roles=(Role.UNIFIED,)) as router:
        answer = await router.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    events = events_of(answer.content)
    assert events[:2] == [b'data: {"n":0}', b'data: {"n":1}']
    assert orjson.loads(events[2].removeprefix(b"data: "))["error"]["code"] == "engine_lost"
    assert events[3:] == [b"data: [DONE]"]
    assert len(bad.asked) == 1
    assert good.asked == []


async def test_a_whole_answer_is_had_elsewhere_even_if_half_of_it_came(engine_of, route_to):
    bad, good = await engine_of(), await engine_of()

    class Half(Response):
        async def __call__(self, scope, receive, send):
            headers = [(b"content-length", b"100"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"half', "more_body": True})

    async def die(request, body):
        return Half()

    bad.script = die
    async with route_to(bad, good, policy="round_robin") as router:
        answers = [await router.http.post("/v1/chat/completions", json=CHAT) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"from": good.url}] * 2


async def test_without_another_engine_the_client_learns_what_happened(engine_of, route_to):
    engine = await engine_of()
    async with route_to(engine) as router:
        engine.script = full
        answer = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["retry-after"], len(engine.asked)) == (503, "7", 1)
        assert answer.json() == {"error": {"message": "full"}}
        engine.script = failing
        answer = await router.http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "r"})
        assert (answer.status_code, answer.headers["x-request-id"], len(engine.asked)) == (500, "r", 2)
        await engine.stop()
        started = time.monotonic()
        answer = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert time.monotonic() - started < 2.0
        await router.until(lambda: router.states()[engine.url] is State.DOWN)
        answer = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert (await router.http.get("/health")).status_code == 503


@pytest.mark.parametrize("status", [400, 404, 429, 504])
async def test_what_others_would_say_too_is_not_retried(engine_of, route_to, status):
    engines = [await engine_of(), await engine_of()]

    async def refuse(request, body):
        return JSONResponse({"error": {"message": "no"}}, status)

    for engine in engines:
        engine.script = refuse
    async with route_to(*engines) as router:
        answer = await router.http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == status
    assert sum(len(engine.asked) for engine in engines) == 1


async def test_a_failed_transfer_is_tried_with_another_prefill_engine(engine_of, route_to):
    prefills = [await engine_of("prefill", bootstrap_port=port) for port in (7001, 7002)]
    decode = await engine_of("decode")

    async def first_peer_is_lost(request, body):
        if body.get("bootstrap_port") == 7001:
            return JSONResponse({"error": {"message": "peer lost", "code": "peer_lost"}}, 502)
        return JSONResponse({"port": body.get("bootstrap_port")})

    decode.script = first_peer_is_lost
    async with route_to(*prefills, decode, policy="round_robin") as router:
        answers = [await router.http.post("/v1/chat/completions", json=CHAT) for _ in range(2)]
        assert [answer.json() for answer in answers] == [{"port": 7002}] * 2
        await prefills[0].stop()
        await prefills[1].stop()
        await router.until(lambda: list(router.states().values()) == [State.DOWN, State.DOWN, State.HEALTHY], 5.0)
        answer = await router.http.post("/v1/chat/completions", json=CHAT)  # decode computes the prompt itself
        assert answer.json() == {"port": None}
        assert (await router.http.get("/health")).status_code == 200
        assert (await router.http.get("/ready")).status_code == 503


async def test_a_client_that_goes_takes_its_request_along(engine_of, route_to, stream):
    engine = await engine_of()
    gone = asyncio.Event()

    async def endless(request, body):
        return stream([b"data: {}\n\n"] * 1000, on_gone=gone.set)

    engine.script = endless
    async with route_to(engine) as router:
        async with router.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            await anext(answer.aiter_bytes())
        async with asyncio.timeout(1.0):
            await gone.wait()
        await router.until(lambda: router.state.num_open == 0 and router.state.pool.num_active == 0)


async def test_a_client_that_goes_before_the_answer_ends_the_wait(engine_of, route_to):
    engine = await engine_of()
    gone = asyncio.Event()

    async def wait(request, body):
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        gone.set()
        return Response()

    engine.script = wait
    async with route_to(engine) as router:
        with pytest.raises(httpx.ReadTimeout):
            await router.http.post("/v1/completions", json={"prompt": "a"}, timeout=0.2)
        async with asyncio.timeout(1.0):
            await gone.wait()
        await router.until(lambda: router.state.num_open == 0)
        assert router.states() == {engine.url: State.HEALTHY}


async def test_a_frozen_engine_is_left_and_its_request_answered_by_another(engine_of, route_to):
    frozen, good = await engine_of(), await engine_of()

    async def freeze(request, body):
        frozen.is_frozen = True
        await asyncio.sleep(30)
        return Response()

    frozen.script = freeze
    async with route_to(frozen, good, policy="round_robin") as router:
        started = time.monotonic()
        answers = [await router.http.post("/v1/chat/completions", json=CHAT) for _ in range(2)]
        assert time.monotonic() - started < 4.0
        assert [answer.json() for answer in answers] == [{"from": good.url}] * 2
        assert router.states()[frozen.url] is State.DOWN


async def test_a_frozen_stream_ends_with_an_error_event(engine_of, route_to, stream):
    engine = await engine_of()

    async def freeze(request, body):
        engine.is_frozen = True
        return stream([b"data: {}\n\n"], pause_s=30)

    engine.script = freeze
    async with route_to(engine) as router:
        answer = await router.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert b"engine_lost" in answer.content
    assert events_of(answer.content)[-1] == b"data: [DONE]"


async def test_a_stream_that_flows_outlives_a_health_check_that_does_not(engine_of, route_to, stream):
    engine = await engine_of()

    async def flow(request, body):
        engine.is_frozen = True  # for /health only: this answer goes on
        return stream([b"data: {}\n\n"] * 40, pause_s=0.03)

    engine.script = flow
    async with route_to(engine) as router:
        answer = await router.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert router.states()[engine.url] is State.HEALTHY
    assert len(events_of(answer.content)) == 40


async def test_too_many_requests_are_refused(engine_of, route_to):
    engine = await engine_of()
    release = asyncio.Event()

    async def wait(request, body):
        await release.wait()
        return JSONResponse({})

    engine.script = wait
    async with route_to(engine, max_active_requests=2) as router:
        waiting = [asyncio.create_task(router.http.post("/generate", json={"text": "a"})) for _ in range(2)]
        await router.until(lambda: router.state.num_open == 2)
        refused = await router.http.post("/generate", json={"text": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "overloaded"
        release.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_the_breaker_spares_an_engine_that_only_looks_healthy(engine_of, route_to):
    bad, good = await engine_of(), await engine_of()
    bad.script = failing
    async with route_to(bad, good, policy="round_robin", breaker_failures=3, breaker_pause=30.0) as router:
        for _ in range(12):
            assert (await router.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert router.states()[bad.url] is State.DOWN
        await asyncio.sleep(0.3)  # it goes on to answer /health
        assert router.states()[bad.url] is State.DOWN
    assert len(bad.asked) == 3


async def test_least_loaded_looks_at_what_engines_report(engine_of, route_to):
    busy, idle = await engine_of(), await engine_of()
    busy.num_waiting = 5
    async with route_to(busy, idle) as router:
        await router.until(lambda: max(member.load for member in router.state.pool) == 5)
        for _ in range(3):
            await router.http.post("/v1/chat/completions", json=CHAT)
    assert (len(busy.asked), len(idle.asked)) == (0, 3)


async def test_requests_go_where_their_model_is(engine_of, route_to):
    engines = [await engine_of(model="a"), await engine_of(model="b")]
    async with route_to(*engines, policy="round_robin") as router:
        for _ in range(3):
            assert (await router.http.post("/generate", json={"model": "b", "text": "x"})).json()["from"] == engines[
                1
            ].url


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"x"'])
async def test_a_body_that_is_no_object_is_refused_at_once(engine_of, route_to, text):
    engine = await engine_of()
    async with route_to(engine) as router:
        answer = await router.http.post("/v1/chat/completions", content=text)
    assert (answer.status_code, engine.asked) == (400, [])


async def test_a_body_beyond_the_limit_is_refused(engine_of, route_to):
    engine = await engine_of()
    async with route_to(engine, max_body_size="1KiB") as router:
        answer = await router.http.post("/generate", content=b"x" * 2000)
    assert (answer.status_code, engine.asked) == (413, [])


async def test_it_learns_which_prompts_decode_serves_faster_alone(engine_of, route_to, stream, monkeypatch):
    monkeypatch.setattr("diptych.router.learning.EXPLORE", 0.45)
    prefill, decode = await engine_of("prefill"), await engine_of("decode")

    async def slower_as_a_pair(request, body):
        # Far longer than a busy machine delays an answer by itself.
        await asyncio.sleep(0.15 if "bootstrap_host" in body else 0.0)
        return stream([b"data: {}\n\n", b"data: [DONE]\n\n"], pause_s=0.0)

    decode.script = slower_as_a_pair
    async with route_to(prefill, decode, learn_local_prefill=True) as router:
        assert router.state.pool.local_prefill_tokens == 0
        async with asyncio.timeout(60):
            while router.state.pool.local_prefill_tokens < 16:
                await router.http.post("/v1/completions", json={"prompt": [1] * 10, "stream": True})
        monkeypatch.setattr("diptych.router.learning.EXPLORE", 0.0)
        decode.asked.clear()
        await router.http.post("/v1/completions", json={"prompt": [1] * 10, "stream": True})
        await router.http.post("/v1/completions", json={"prompt": [1] * 5000, "stream": True})
        assert "diptych_router_local_prefill_tokens 16.0" in (await router.http.get("/metrics")).text
    assert ["bootstrap_host" in body for body in decode.asked] == [False, True]
