"""The router's own routes: membership, health, fan-out, keys, metrics."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from diptych.router.config import Role
from diptych.router.member import State


async def test_roles_are_learned_from_the_engines(engine_of, route_to):
    engines = [await engine_of("prefill", bootstrap_port=9001), await engine_of("decode"), await engine_of()]
    async with route_to(*engines) as router:
        workers = (await router.http.get("/workers")).json()["workers"]
    assert [(one["url"], one["role"], one["bootstrap_port"]) for one in workers] == [
        (engines[0].url, "prefill", 9001),
        (engines[1].url, "decode", None),
        (engines[2].url, "unified", None),
    ]
    assert all(one["state"] == "healthy" and one["models"] == ["fake"] for one in workers)


async def test_a_given_role_wins(engine_of, route_to):
    engine = await engine_of("null")
    async with route_to(engine, roles=(Role.DECODE,)) as router:
        assert [member.role for member in router.state.pool] == [Role.DECODE]


async def test_health_needs_a_pair(engine_of, route_to):
    prefill = await engine_of("prefill")
    async with route_to(prefill) as router:
        assert (await router.http.get("/health")).status_code == 503
        assert (await router.http.post("/generate", json={"text": "a"})).status_code == 503
        decode = await engine_of("decode")
        added = await router.http.post("/workers", json={"url": decode.url + "/"})
        assert (added.status_code, added.json()["state"]) == (202, "joining")
        await router.joined()
        assert (await router.http.get("/health")).status_code == 200
        assert (await router.http.get("/ready")).status_code == 200


async def test_a_decode_engine_alone_is_not_a_pair(engine_of, route_to):
    async with route_to(await engine_of("decode")) as router:
        assert (await router.http.get("/health")).status_code == 503


async def test_a_role_can_change_while_the_router_runs(engine_of, route_to, monkeypatch):
    monkeypatch.setattr("diptych.router.health.REFRESH_S", 0.1)
    engine = await engine_of("prefill")
    async with route_to(engine) as router:
        engine.info["disaggregation_mode"] = "null"
        await router.until(lambda: next(iter(router.state.pool)).role is Role.UNIFIED)
        assert (await router.http.get("/ready")).status_code == 200


async def test_an_engine_joins_when_it_is_ready_and_leaves_when_it_drains(engine_of, route_to):
    loading, other = await engine_of(), await engine_of()
    loading.health_status = 503
    async with route_to(loading, other, waits=False) as router:
        await router.until(lambda: router.states()[other.url] is State.HEALTHY)
        assert router.states()[loading.url] is State.JOINING
        loading.health_status = 200
        await router.joined()
        loading.health_status = 503
        await router.until(lambda: router.states()[loading.url] is State.DRAINING)
        for _ in range(4):
            assert (await router.http.post("/generate", json={"text": "a"})).json() == {"from": other.url}
        assert loading.asked == []
        loading.health_status = 200
        await router.joined()


async def test_a_refusal_shows_at_once_that_an_engine_drains(engine_of, route_to):
    draining, other = await engine_of(), await engine_of()

    async def refuse(request, body):
        draining.health_status = 503
        return Response(status_code=503)

    draining.script = refuse
    async with route_to(draining, other, policy="round_robin", health_interval=30.0) as router:
        for _ in range(2):
            assert (await router.http.post("/generate", json={"text": "a"})).status_code == 200
        await router.until(lambda: router.states()[draining.url] is State.DRAINING)


async def test_a_removed_engine_finishes_what_it_has(engine_of, route_to, stream):
    leaving, other = await engine_of(), await engine_of()

    async def slow(request, body):
        return stream([b"data: {}\n\n"] * 20 + [b"data: [DONE]\n\n"], pause_s=0.03)

    leaving.script = slow
    async with route_to(leaving, other, policy="round_robin") as router:
        running = asyncio.create_task(router.http.post("/generate", json={"text": "a", "stream": True}))
        await router.until(lambda: bool(leaving.asked))
        removed = await router.http.request("DELETE", "/workers", json={"url": leaving.url})
        assert (removed.json()["state"], removed.json()["active"]) == ("removed", 1)
        for _ in range(3):
            assert (await router.http.post("/generate", json={"text": "a"})).json() == {"from": other.url}
        assert (await running).content.endswith(b"data: [DONE]\n\n")
        await router.until(lambda: set(router.states()) == {other.url})
        again = await router.http.delete("/workers", params={"url": leaving.url})
        assert again.status_code == 400
        assert (await router.http.post("/workers", json={"url": leaving.url})).status_code == 202
        await router.joined()


async def test_a_restarted_engine_comes_back(engine_of, route_to):
    engine = await engine_of()
    async with route_to(engine) as router:
        port = engine.port
        await engine.stop()
        await router.until(lambda: router.states()[engine.url] is State.DOWN)
        await engine.start(port)
        await router.joined()
        assert (await router.http.post("/generate", json={"text": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": 5}, "url"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://u:p@x"}, "url"),
        ({"url": "http://x:99999"}, "url"),
        ({"url": "http://x", "role": "chef"}, "role"),
        ({"url": "http://x", "bootstrap_port": "y"}, "bootstrap_port"),
        ({"url": "http://x", "bootstrap_port": 0}, "url"),
    ],
)
async def test_a_bad_engine_is_refused_by_name(route_to, body, param):
    async with route_to() as router:
        answer = await router.http.post("/workers", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_engine_is_added_once_and_only_as_json(engine_of, route_to):
    engine = await engine_of()
    async with route_to(engine) as router:
        assert (await router.http.post("/workers", json={"url": engine.url})).status_code == 400
        plain = await router.http.post(
            "/workers", content=b'{"url":"http://x"}', headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415
        assert list(router.states()) == [engine.url]


async def test_models_are_those_of_all_engines(engine_of, route_to):
    engines = [await engine_of(model="a"), await engine_of(model="b"), await engine_of(model="a")]
    async with route_to(*engines) as router:
        models = (await router.http.get("/v1/models")).json()
        assert [card["id"] for card in models["data"]] == ["a", "b"]
        assert (await router.http.get("/v1/models/b")).json()["id"] == "b"
        assert (await router.http.get("/v1/models/c")).status_code == 404


async def test_loads_name_their_engines(engine_of, route_to):
    engines = [await engine_of("prefill"), await engine_of("decode")]
    engines[1].num_waiting = 3
    async with route_to(*engines) as router:
        await router.until(lambda: max(member.load for member in router.state.pool) == 3)
        loads = (await router.http.get("/v1/loads?include=core")).json()["loads"]
        assert [(one["worker"], one["role"], one["num_waiting_reqs"]) for one in loads] == [
            (engines[0].url, "prefill", 0),
            (engines[1].url, "decode", 3),
        ]
        assert [one["load"] for one in (await router.http.get("/get_loads")).json()["workers"]] == [0, 3]
        assert [one["num_reqs"] for one in (await router.http.get("/get_load")).json()] == [0, 3]


async def test_flush_and_abort_reach_every_engine(engine_of, route_to):
    engines = [await engine_of(), await engine_of()]
    async with route_to(*engines) as router:
        assert (await router.http.post("/flush_cache?timeout=1")).status_code == 200
        assert (await router.http.post("/abort_request", json={"rid": "a"})).status_code == 200

        async def busy(request, body):
            return PlainTextResponse("busy", 400)

        engines[1].script = busy
        failed = await router.http.get("/flush_cache")
        assert (failed.status_code, engines[1].url in failed.text) == (400, True)
        assert (await router.http.post("/flush_cache?timeout=nan")).status_code == 400
    assert engines[0].paths == ["/flush_cache", "/abort_request", "/flush_cache"]
    assert engines[0].asked[1] == {"rid": "a"}


async def test_other_questions_go_to_any_engine_without_a_pair(engine_of, route_to):
    prefill, decode = await engine_of("prefill"), await engine_of("decode")
    async with route_to(prefill, decode) as router:
        await router.http.post("/tokenize", json={"prompt": "a"})
        assert (await router.http.get("/version")).json()["version"]
        assert (await router.http.get("/nothing")).status_code == 404
    assert decode.asked == [{"prompt": "a"}]


async def test_keys(engine_of, route_to):
    engine = await engine_of()
    admin, client = {"Authorization": "Bearer boss"}, {"Authorization": "Bearer k"}
    async with route_to(engine, api_key="k", admin_api_key="boss", engine_api_key="inner") as router:
        post, get = router.http.post, router.http.get
        assert (await post("/generate", json={"text": "a"})).status_code == 401
        assert (await post("/generate", json={"text": "a"}, headers=admin)).status_code == 401
        assert (await post("/generate", json={"text": "a"}, headers=client)).status_code == 200
        assert (await get("/workers", headers=client)).status_code == 401
        assert (await get("/workers", headers=admin)).status_code == 200
        assert [(await get(path)).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
    assert engine.headers[0]["authorization"] == "Bearer inner"


async def test_a_clients_key_reaches_the_engine(engine_of, route_to):
    engine = await engine_of()
    async with route_to(engine) as router:
        await router.http.post("/generate", json={"text": "a"}, headers={"Authorization": "Bearer theirs"})
    assert engine.headers[0]["authorization"] == "Bearer theirs"


async def test_beyond_loopback_membership_needs_a_key(engine_of, route_to):
    engine = await engine_of()
    async with route_to(engine, host="0.0.0.0") as router:
        assert (await router.http.get("/workers")).status_code == 403
        assert (await router.http.post("/generate", json={"text": "a"})).status_code == 200
    async with route_to(engine, host="0.0.0.0", admin_api_key="k") as router:
        assert (await router.http.get("/workers")).status_code == 401


async def test_an_engine_that_refuses_our_key_says_so(engine_of, route_to):
    engine = await engine_of()

    async def reply(request):
        return JSONResponse({}, 401) if request.url.path != "/health" else Response()

    engine._reply = reply
    async with route_to(engine, waits=False) as router:
        await router.until(lambda: "401" in next(iter(router.state.pool)).last_error)
        assert router.states()[engine.url] is State.JOINING


async def test_a_draining_router_takes_nothing_new(engine_of, route_to):
    async with route_to(await engine_of()) as router:
        router.state.is_draining = True
        answer = await router.http.post("/generate", json={"text": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await router.http.get("/health")).status_code == 503


async def test_metrics_show_the_pool(engine_of, route_to):
    engine = await engine_of()
    async with route_to(engine) as router:
        await router.http.post("/generate", json={"text": "a"})
        text = (await router.http.get("/metrics")).text
    assert 'diptych_router_engines{role="unified",state="healthy"} 1.0' in text
    assert f'diptych_router_requests_total{{engine="{engine.url}",outcome="ok"}} 1.0' in text
    assert f'diptych_router_active_requests{{engine="{engine.url}"}} 0.0' in text
    assert "diptych_router_time_to_first_byte_seconds_count 1.0" in text
