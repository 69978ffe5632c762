"""The registry of a prefill engine: what it takes, what it tells, and whom it sends away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from diptych.errors import ConfigError
from diptych.server.listening import listen
from diptych.server.registry import MAX_BODY_NBYTES, Registry, RegistryServer, create_registry_app

SGLANG = {"role": "Prefill", "tp_size": 2, "dp_size": 1, "rank_ip": "10.0.0.1", "rank_port": 5000, "engine_rank": 0}


@asynccontextmanager
async def asking(registry: Registry, **settings) -> AsyncIterator[httpx.AsyncClient]:
    settings = {"cluster_key": None, **settings}
    transport = httpx.ASGITransport(app=create_registry_app(registry, **settings), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as http:
        yield http


def query(rank: object, group: object) -> dict[str, object]:
    return {"engine_rank": rank, "target_dp_group": group}


async def test_the_life_of_a_registry():
    async with asking(Registry()) as http:
        response = await http.get("/route", params=query(-1, -1))
        assert response.status_code == 503 and "retry-after" in response.headers
        assert (await http.put("/route", json=SGLANG)).status_code == 200
        response = await http.get("/route", params=query(0, 0))
        assert response.status_code == 503 and "1 of 2 ranks" in response.json()["error"]["message"]
        second = {**SGLANG, "engine_rank": 1, "rank_port": 5001}
        assert (await http.put("/route", json=second)).status_code == 200
        summary = (await http.get("/route", params=query(-1, -1))).json()
        assert (summary["prefill_tp_size"], summary["prefill_dp_size"], summary["pp_size"]) == (2, 1, 1)
        route = (await http.get("/route", params=query(1, 0))).json()
        assert (route["rank_ip"], route["rank_port"]) == ("10.0.0.1", 5001)
        assert {"instance_id", "protocol_version", "fingerprint", "pp_size"} <= route.keys()
        assert (await http.get("/route", params=query(2, 0))).status_code == 404
        assert (await http.get("/route", params=query(0, 1))).status_code == 404
        assert (await http.get("/route", params=query(-1, 0))).status_code == 404


async def test_groups_split_the_ranks():
    async with asking(Registry()) as http:
        for rank in range(4):
            body = {**SGLANG, "tp_size": 4, "dp_size": 2, "engine_rank": rank, "rank_port": 5000 + rank}
            assert (await http.put("/route", json=body)).status_code == 200
        ports = [
            (await http.get("/route", params=query(rank, group))).json()["rank_port"]
            for group in range(2)
            for rank in range(2)
        ]
        assert ports == [5000, 5001, 5002, 5003]
        assert (await http.get("/route", params=query(2, 0))).status_code == 404


async def test_a_restarted_engine_replaces_the_old_one():
    async with asking(Registry()) as http:
        alone = {**SGLANG, "tp_size": 1, "instance_id": "a"}
        await http.put("/route", json=alone)
        await http.put("/route", json={**alone, "tp_size": 2, "instance_id": "b"})
        assert (await http.get("/route", params=query(0, 0))).status_code == 503
        await http.put("/route", json={**alone, "tp_size": 2, "instance_id": "b", "engine_rank": 1})
        assert (await http.get("/route", params=query(0, 0))).json()["instance_id"] == "b"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"role": "Decode"}, "role"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": "many"}, "tp_size"),
        ({"dp_size": 3}, "dp_size"),
        ({"engine_rank": 2}, "engine_rank"),
        ({"engine_rank": -1}, "engine_rank"),
        ({"rank_port": 70000}, "rank_port"),
        ({"rank_ip": ""}, "rank_ip"),
        ({"rank_ip": "a b\n"}, "rank_ip"),
        ({"rank_ip": None}, "rank_ip"),
        ({"instance_id": "x" * 1000}, "instance_id"),
    ],
)
async def test_bad_registrations_name_their_field(change, param):
    registry = Registry()
    async with asking(registry) as http:
        response = await http.put("/route", json={**SGLANG, **change})
        assert response.status_code == 400 and response.json()["error"]["param"] == param
        assert (await http.get("/route", params=query(0, 0))).status_code == 503


async def test_ranks_of_an_engine_must_agree():
    async with asking(Registry()) as http:
        await http.put("/route", json={**SGLANG, "fingerprint": "a"})
        response = await http.put("/route", json={**SGLANG, "engine_rank": 1, "fingerprint": "b"})
        assert response.status_code == 400
        assert "fingerprint is b here and a on another rank" in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\x80\x04K\x01.", b'{"role": ' + b"[" * 5000])
async def test_foreign_bytes_are_a_400(content):
    async with asking(Registry()) as http:
        assert (await http.put("/route", content=content)).status_code == 400


async def test_a_large_body_is_refused():
    async with asking(Registry()) as http:
        assert (await http.put("/route", content=b" " * (MAX_BODY_NBYTES + 1))).status_code == 413


@pytest.mark.parametrize("params", [{}, {"engine_rank": 0}, query("x", 0), query("1.5", 0), query("9" * 30, 0)])
async def test_bad_questions_are_a_400(params):
    async with asking(Registry()) as http:
        assert (await http.get("/route", params=params)).status_code == 400


async def test_writes_need_the_cluster_key():
    async with asking(Registry(), cluster_key="secret") as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = await http.put("/route", json={**SGLANG, "tp_size": 1}, headers=headers)
            assert response.status_code == 401 and "www-authenticate" in response.headers
        headers = {"Authorization": "Bearer secret"}
        assert (await http.put("/route", json={**SGLANG, "tp_size": 1}, headers=headers)).status_code == 200
        assert (await http.get("/route", params=query(0, 0))).status_code == 200


async def test_our_own_engine_owns_its_registry(fake):
    registry = Registry()
    async with asking(registry) as http:
        await http.put("/route", json={**SGLANG, "instance_id": "stranger"})
        info = fake.info_of("prefill")
        registry.own(info)
        route = (await http.get("/route", params=query(0, 0))).json()
        assert f"{route['rank_ip']}:{route['rank_port']}" == info.peer.address
        assert route["instance_id"] == info.peer.instance_id and route["protocol_version"] == 1
        summary = (await http.get("/route", params=query(-1, -1))).json()
        assert summary["fingerprint"] == "f1" and summary["page_size"] == 16 and summary["num_layers"] == 2
        response = await http.put("/route", json={**SGLANG, "instance_id": "stranger"})
        assert response.status_code == 409
        assert (await http.get("/route", params=query(0, 0))).json() == route


async def test_an_engine_that_does_not_serve_sends_everybody_away():
    async with asking(Registry(), is_serving=lambda: False) as http:
        await http.put("/route", json={**SGLANG, "tp_size": 1})
        assert (await http.get("/route", params=query(0, 0))).status_code == 503
        assert (await http.get("/health")).status_code == 503
    async with asking(Registry()) as http:
        assert (await http.get("/health")).status_code == 200


async def test_the_port_opens_and_closes():
    server = RegistryServer(create_registry_app(Registry(), cluster_key=None), "127.0.0.1", port=0)
    server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/health")).status_code == 200
    await server.stop()
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/health")


def test_a_taken_port_is_a_configuration_error():
    with listen("127.0.0.1", 0, flag="--port") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*--disaggregation-bootstrap-port"):
            RegistryServer(create_registry_app(Registry(), cluster_key=None), "127.0.0.1", port=port)
