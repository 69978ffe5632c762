"""Which engine takes part in a request, seen from the routes down to what the engine is told; on fake engines."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from diptych.config import TransferConfig
from diptych.core.messages import TransferLoad
from diptych.core.request import HandTo, TakeFrom
from diptych.errors import ConfigError
from diptych.server.hosts import HostList

LOCAL = {"bootstrap_host": "127.0.0.1"}


@pytest.fixture
async def pair(make_world):
    """A prefill and a decode world."""
    async with AsyncExitStack() as stack:
        prefill = TransferConfig(role="prefill", disaggregation_bootstrap_port=0)
        yield (
            await stack.enter_async_context(make_world(transfer=prefill)),
            await stack.enter_async_context(make_world(transfer=TransferConfig(role="decode"))),
        )


def told(world) -> list[HandTo | TakeFrom | None]:
    """What the engine was told to do with its peers, in the order of the sequences."""
    found = [request.handoff for request in world.engine.requests]
    world.engine.requests.clear()
    return found


def meeting(prefill, **more) -> dict[str, object]:
    return {**LOCAL, "bootstrap_port": prefill.state.matchmaker.bootstrap_port, **more}


def take(prefill, room=None) -> TakeFrom:
    peer = prefill.engine.info.peer
    return TakeFrom(peer.address, peer.instance_id, room)


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
TEXT = {"prompt": "ab", "max_tokens": 4}
NATIVE = {"text": "ab", "sampling_params": {"max_new_tokens": 4}}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/generate", NATIVE)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_both_are_told(pair, path, body, stream):
    prefill, decode = pair
    body = {**body, "stream": stream, **meeting(prefill, bootstrap_room=77)}
    responses = [await world.http.post(path, json=body) for world in pair]
    assert [response.status_code for response in responses] == [200, 200]
    assert told(prefill) == [HandTo(77)]
    assert told(decode) == [take(prefill, 77)]


async def test_prefill_answers_with_one_token(pair):
    prefill, _ = pair
    answer = (await prefill.http.post("/v1/completions", json={**TEXT, **LOCAL, "bootstrap_room": 1})).json()
    assert answer["usage"]["completion_tokens"] == 1 and answer["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_does_not_end_what_is_handed_over(pair):
    prefill, _ = pair
    for world in pair:
        world.say("x")
    body = {**TEXT, "stop": ["x"], **meeting(prefill, bootstrap_room=1)}
    answers = [(await world.http.post("/v1/completions", json=body)).json()["choices"][0] for world in pair]
    assert [answer["finish_reason"] for answer in answers] == ["length", "stop"]


async def test_decode_drives(pair):
    prefill, decode = pair
    assert (await decode.http.post("/generate", json={**NATIVE, **meeting(prefill)})).status_code == 200
    assert told(decode) == [take(prefill)] and not told(prefill)


async def test_batches_and_n(pair):
    prefill, decode = pair
    body = {"prompt": ["ab", "cd"], "max_tokens": 1, "n": 2, **meeting(prefill, bootstrap_room=[10, 20])}
    for world in pair:
        assert (await world.http.post("/v1/completions", json=body)).status_code == 200
    assert sorted(handoff.room for handoff in told(prefill)) == [10, 11, 20, 21]
    assert sorted(handoff.room for handoff in told(decode)) == [10, 11, 20, 21]
    native = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1, "n": 1}, {"max_new_tokens": 1, "n": 2}]}
    await decode.http.post("/generate", json={**native, **meeting(prefill, bootstrap_room=5)})
    prompts = [(bytes(request.prompt_token_ids), request.handoff.room) for request in decode.engine.requests]
    rooms = [room for _, room in sorted(prompts)]
    assert rooms[0] == 5 and sorted(rooms[1:]) == [6, 7]


async def test_a_prefill_engine_needs_a_room_or_serves_alone(pair):
    prefill, _ = pair
    response = await prefill.http.post("/generate", json={**NATIVE, **LOCAL})
    assert response.status_code == 400 and response.json()["error"]["param"] == "bootstrap_room"
    assert (await prefill.http.post("/generate", json=NATIVE)).json()["meta_info"]["completion_tokens"] == 4
    assert told(prefill) == [None]


async def test_sglangs_health_probe_is_local(pair):
    probe = {**NATIVE, "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    for world in pair:
        assert (await world.http.post("/generate", json=probe)).status_code == 200
        assert told(world) == [None]


async def test_only_allowed_hosts_are_asked(pair):
    _, decode = pair
    for host in ("10.0.0.1", "169.254.169.254", "example.com"):
        response = await decode.http.post("/generate", json={**NATIVE, "bootstrap_host": host, "bootstrap_room": 1})
        assert response.status_code == 400 and response.json()["error"]["param"] == "bootstrap_host"
    ticket = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}
    response = await decode.http.post("/v1/completions", json={**TEXT, "kv_transfer_params": ticket})
    assert response.status_code == 400
    assert not decode.engine.requests


async def test_input_logprobs_are_said_once(pair):
    prefill, decode = pair
    body = {**NATIVE, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    for world, room, num_inputs in ((prefill, 1, 2), (decode, 1, 0), (decode, None, 2)):
        answer = await world.http.post("/generate", json={**body, **meeting(prefill, bootstrap_room=room)})
        meta = answer.json()["meta_info"]
        assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == num_inputs
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


# -- nobody at the rendezvous


async def missed(world) -> tuple[float, float]:
    text = (await world.http.get("/metrics")).text
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    return values.get("vllm:num_bootstrap_failed_reqs_total", 0), values.get("vllm:num_local_prefill_reqs_total", 0)


async def test_without_a_registry_decode_computes_itself_unless_both_are_told(pair):
    _, decode = pair
    assert (await decode.http.post("/generate", json={**NATIVE, **LOCAL, "bootstrap_port": 1})).status_code == 200
    assert told(decode) == [None]
    response = await decode.http.post("/generate", json={**NATIVE, **LOCAL, "bootstrap_port": 1, "bootstrap_room": 3})
    assert response.status_code == 503 and "127.0.0.1:1" in response.json()["error"]["message"]
    assert await missed(decode) == (2, 1)


async def test_without_local_prefill_it_is_an_error(make_world):
    async with make_world(transfer=TransferConfig(role="decode", local_prefill=False)) as decode:
        response = await decode.http.post("/generate", json={**NATIVE, **LOCAL, "bootstrap_port": 1})
        assert response.status_code == 502 and response.json()["error"]["code"] == "peer_lost"
        assert not decode.engine.requests


async def test_an_engine_without_peers_says_so(world):
    assert (await world.http.post("/generate", json={**NATIVE, **LOCAL})).status_code == 200
    assert told(world) == [None]
    response = await world.http.post("/generate", json={**NATIVE, **LOCAL, "bootstrap_room": 1})
    assert response.status_code == 400 and "--role" in response.json()["error"]["message"]


async def test_a_draining_prefill_engine_is_not_found(pair):
    prefill, decode = pair
    prefill.state.is_draining = True
    response = await decode.http.post("/generate", json={**NATIVE, **meeting(prefill, bootstrap_room=3)})
    assert response.status_code == 503 and "not ready" in response.json()["error"]["message"]


async def test_the_registry_is_asked_once_for_a_burst(make_world):
    num_asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.05)
        body = b'{"rank_ip": "127.0.0.1", "rank_port": 7, "instance_id": "i"}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with make_world(transfer=TransferConfig(role="decode")) as decode:
            body = {**NATIVE, **LOCAL, "bootstrap_port": port}
            await asyncio.gather(*(decode.http.post("/generate", json=body) for _ in range(8)))
            assert told(decode) == [TakeFrom("127.0.0.1:7", "i")] * 8
    assert num_asked == 1


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"rank_ip": "a b", "rank_port": 1}', b'{"rank_ip": "a"}', b"x" * 100000]
)
async def test_a_strange_registry_is_no_registry(make_world, body):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with make_world(transfer=TransferConfig(role="decode")) as decode:
            both = {**NATIVE, **LOCAL, "bootstrap_port": port, "bootstrap_room": 1}
            response = await decode.http.post("/generate", json=both)
            assert response.status_code == 503 and "registry" in response.json()["error"]["message"]


# -- vLLM's way


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_a_ticket_leads_decode_to_prefill(pair, path, body):
    prefill, decode = pair
    wants = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
             "remote_host": None, "remote_port": None}  # fmt: skip
    answer = (await prefill.http.post(path, json={**body, "max_tokens": 1, "kv_transfer_params": wants})).json()
    assert told(prefill) == [None]
    ticket = answer["kv_transfer_params"]
    assert ticket["do_remote_prefill"] and ticket["remote_port"] == prefill.state.matchmaker.bootstrap_port
    await decode.http.post(path, json={**body, "kv_transfer_params": ticket})
    assert told(decode) == [take(prefill)]
    await prefill.http.post(path, json={**body, "kv_transfer_params": ticket})
    assert told(prefill) == [None]


async def test_without_a_registry_there_is_no_ticket(pair):
    _, decode = pair
    answer = (
        await decode.http.post("/v1/completions", json={**TEXT, "kv_transfer_params": {"do_remote_decode": 1}})
    ).json()
    assert answer["kv_transfer_params"] is None
    assert (await decode.http.post("/v1/completions", json={**TEXT, "kv_transfer_params": None})).status_code == 200
    assert "kv_transfer_params" not in (await decode.http.post("/v1/completions", json=TEXT)).json()


# -- what is advertised


async def test_an_engine_says_what_it_is(pair, world):
    infos = [(await each.http.get("/server_info")).json() for each in (*pair, world)]
    assert [info["disaggregation_mode"] for info in infos] == ["prefill", "decode", "null"]
    assert [info["role"] for info in infos] == ["prefill", "decode", "unified"]
    assert infos[0]["disaggregation_bootstrap_port"] == pair[0].state.matchmaker.bootstrap_port > 0
    assert infos[1]["disaggregation_bootstrap_port"] is None and infos[2]["instance_id"] is None
    assert infos[0]["instance_id"] == pair[0].engine.info.peer.instance_id
    assert all("cluster_key" not in info and "api_key" not in info for info in infos)
    assert (await pair[0].http.get("/model_info")).json()["disaggregation_mode"] == "prefill"


async def test_loads_have_a_disaggregation_block(pair):
    prefill, _ = pair
    entry = (await prefill.http.get("/v1/loads?include=core,disagg")).json()["loads"][0]["disaggregation"]
    assert entry == {"mode": "prefill"}
    prefill.engine.transfer = TransferLoad(
        num_outgoing_rooms=3, num_outgoing_waiting=1, num_incoming_rooms=2, failures_total={"EXPIRED": 1}
    )
    entry = (await prefill.http.get("/v1/loads?include=core,disagg")).json()["loads"][0]["disaggregation"]
    assert (entry["prefill_bootstrap_queue_reqs"], entry["prefill_inflight_queue_reqs"]) == (1, 2)
    assert entry["decode_transfer_queue_reqs"] == 2 and entry["failures"] == {"EXPIRED": 1}


@pytest.mark.parametrize(
    ("kind", "status"), [("PeerLost", 502), ("TransferExpired", 502), ("PeerIncompatible", 502), ("RoomTaken", 409)]
)
async def test_failed_transfers_have_their_status(pair, kind, status):
    prefill, _ = pair
    prefill.engine.failure = (kind, "so it went", None)
    response = await prefill.http.post("/generate", json={**NATIVE, **LOCAL, "bootstrap_room": 1})
    assert response.status_code == status and "so it went" in response.json()["error"]["message"]


async def test_the_role_can_be_switched(pair):
    prefill, decode = pair
    port = prefill.state.matchmaker.bootstrap_port
    answer = await prefill.http.post("/pd_role_switch", json={"new_role": "decode"})
    assert answer.status_code == 200 and answer.json()["disaggregation_mode"] == "decode"
    assert (await prefill.http.get("/server_info")).json()["disaggregation_bootstrap_port"] is None
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://127.0.0.1:{port}/health")
    await decode.http.post("/pd_role_switch", json={"new_role": "prefill"})
    port = (await decode.http.get("/server_info")).json()["disaggregation_bootstrap_port"]
    body = {**NATIVE, **LOCAL, "bootstrap_port": port, "bootstrap_room": 4}
    for world in pair:
        assert (await world.http.post("/generate", json=body)).status_code == 200
    assert told(decode) == [HandTo(4)] and told(prefill) == [take(decode, 4)]
    assert (await decode.http.post("/pd_role_switch", json={"new_role": "null"})).json()[
        "disaggregation_mode"
    ] == "null"


async def test_what_cannot_be_switched_is_refused(pair, world):
    _, decode = pair
    assert (await world.http.post("/pd_role_switch", json={"new_role": "decode"})).status_code == 400
    assert (await decode.http.post("/pd_role_switch", json={"new_role": "x"})).json()["error"]["param"] == "new_role"
    text = await decode.http.post("/pd_role_switch", content=b'{"new_role": "unified"}')
    assert text.status_code == 400 and decode.state.matchmaker.role == "decode"


async def test_a_taken_port_leaves_the_role_as_it_was(pair, make_world):
    prefill, _ = pair
    port = prefill.state.matchmaker.bootstrap_port
    async with make_world(transfer=TransferConfig(role="decode", disaggregation_bootstrap_port=port)) as other:
        response = await other.http.post("/pd_role_switch", json={"new_role": "prefill"})
        assert response.status_code == 503 and str(port) in response.json()["error"]["message"]
        assert (await other.http.get("/server_info")).json()["disaggregation_mode"] == "decode"


# -- the allow list


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "10.1.2.3", "fd00::1"])
def test_listed_hosts(host):
    assert host in HostList("localhost, 127.0.0.1,10.1.0.0/16,fd00::/8")


@pytest.mark.parametrize("host", ["", "localhost.evil", "127.0.0.2", "10.2.0.1", "10.1.0.0/16", "::1"])
def test_other_hosts(host):
    assert host not in HostList("localhost, 127.0.0.1,10.1.0.0/16,fd00::/8")


def test_a_network_must_be_one():
    with pytest.raises(ConfigError, match="allowed_bootstrap_hosts"):
        HostList("10.0.0.1/8")
