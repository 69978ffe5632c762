"""Prefill and decode apart over HTTP: `diptych pd`, and the routers that others run before such engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
from live_server import LiveServer, run_server, wait_for

from diptych.errors import PeerIncompatible
from diptych.server.peer_transfer import receive_from
from diptych.server.registry_client import PrefillSummary, RankRoute, ask_registry, open_session

ENGINE_FLAGS = ("--kv-cache-memory", "16MiB", "--num-threads", "1", "--dtype", "float32", "--max-model-len", "1024")
PROMPT = "The hinge joins two panels, and the panels fold: what one has seen the other may tell."
ROUTERS = {
    "sglang-router": ["-m", "sglang_router.launch_router", "--pd-disaggregation"],
    "smg": ["-m", "smg", "launch", "--pd-disaggregation"],
    "vllm-router": ["-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"],
}


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own session, ended by SIGTERM, or SIGKILL if that does not help."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def run_cluster(model: Path, folder: Path) -> Iterator[LiveServer]:
    """`diptych pd` with the tiny model: one prefill engine, one decode engine, one router."""
    log = folder / "pd.log"
    command = [sys.executable, "-m", "diptych", "pd", str(model), "--port", "0", *ENGINE_FLAGS]
    with running(command, log) as process:

        def url() -> str | None:
            assert process.poll() is None, log.read_text()
            found = re.search(r" at (http://\S+), prefill and decode apart", log.read_text())
            return found and found[1]

        yield LiveServer(str(wait_for(url, 100, "the cluster did not get ready")), "tiny-llama", process, log)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with run_cluster(tiny_model, tmp_path_factory.mktemp("pd")) as live:
        yield live


@pytest.fixture(scope="module")
def unified(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One engine that does it all: what the others' answers are compared with."""
    with run_server(tmp_path_factory.mktemp("unified"), str(tiny_model), *ENGINE_FLAGS, name="tiny-llama") as live:
        yield live


def engine_url(cluster: LiveServer, role: str) -> str:
    (worker,) = [w for w in cluster.get("/workers")["workers"] if w["role"] == role]
    return str(worker["url"])


def rooms_done(cluster: LiveServer) -> int:
    text = httpx.get(engine_url(cluster, "decode") + "/server_info").text
    assert '"disaggregation_mode":"decode"' in text
    load = httpx.get(engine_url(cluster, "prefill") + "/v1/loads?include=core,disagg").json()["loads"][0]
    return int(load["disaggregation"]["rooms_done"])


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}),
    "one token": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}),
    "a batch": ("/v1/completions", {"prompt": [PROMPT, PROMPT[:7], "x"], "max_tokens": 8, "temperature": 0}),
    "seeded": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.3, "seed": 7}),
    "penalties": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    ),
    "logprobs": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 3}),
    "echo": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 2, "echo": True}),
    "n": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.8, "seed": 3, "n": 3}),
    "a stop": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stop": ["e", "\u00e9"]}),
    "regex": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "regex": "[ab]{5}c"}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "temperature": 0},
    ),
    "native": (
        "/generate",
        {"text": PROMPT, "sampling_params": {"max_new_tokens": 9, "temperature": 0}, "return_logprob": True},
    ),
}
# What no two servers have in common.
VOLATILE = {"id", "created", "e2e_latency", "cached_tokens", "system_fingerprint"}


def rounded(value: Any) -> Any:
    """An answer without what differs from run to run."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("name", BODIES)
def test_apart_answers_as_unified(cluster: LiveServer, unified: LiveServer, name: str) -> None:
    path, body = BODIES[name]
    before = rooms_done(cluster)
    apart = cluster.post(path, body)
    assert rounded(apart) == rounded(unified.post(path, body))
    # An output of one token is over before its KV has landed.
    assert rooms_done(cluster) > before or body.get("max_tokens") == 1


def test_streams_with_the_openai_sdk(cluster: LiveServer, unified: LiveServer) -> None:
    texts = []
    for live in (cluster, unified):
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="tiny-llama", prompt=PROMPT + " And on.", max_tokens=30, temperature=0, stream=True
            )
            texts.append("".join(event.choices[0].text for event in stream))
    assert texts[0] == texts[1] and texts[0]


def test_a_client_that_leaves_frees_both_engines(cluster: LiveServer) -> None:
    body = {"prompt": PROMPT * 3, "max_tokens": 800, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_bytes())

    def is_at_rest() -> bool:
        loads = [
            httpx.get(engine_url(cluster, role) + "/v1/loads").json()["loads"][0] for role in ("prefill", "decode")
        ]
        return all(load["num_total_reqs"] == 0 for load in loads)

    wait_for(is_at_rest, 5, "the engines did not notice")


def test_a_router_killed_in_mid_stream_leaves_nothing_behind(
    engines: tuple[LiveServer, LiveServer], unified: LiveServer, tmp_path: Path
) -> None:
    """kill -9 of the router: the engines drop what nobody reads, and the next router finds them as they were."""
    prefill, decode = engines
    port = free_port()
    command = [sys.executable, "-m", "diptych", "route", "--port", str(port)]
    command += ["--prefill", prefill.url, "--decode", decode.url]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    long = {"prompt": PROMPT * 2, "max_tokens": 800, "temperature": 0, "ignore_eos": True, "stream": True}
    for number in range(2):
        with running(command, tmp_path / f"router-{number}.log") as router:
            wait_for(is_ready, 30, "the router did not get ready")
            path, body = BODIES["greedy"]
            answer = httpx.post(url + path, json=body, timeout=30).json()
            assert texts_of(answer) == texts_of(unified.post(path, body))
            with (
                pytest.raises(httpx.TransportError),
                httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=10) as response,
            ):
                chunks = response.iter_bytes()
                next(chunks)
                router.kill()
                for _ in chunks:
                    pass
            for engine in engines:
                engine.wait_until_idle(2.0)
                disaggregation = engine.get("/v1/loads?include=disagg")["loads"][0]["disaggregation"]
                assert disaggregation["quarantined_pages"] == 0


def test_prefill_killed_costs_no_answer(cluster: LiveServer, unified: LiveServer) -> None:
    """kill -9 of the prefill server: requests go on, computed by decode, within seconds."""
    path, body = BODIES["greedy"]
    port = int(engine_url(cluster, "prefill").rsplit(":", 1)[1])
    (victim,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    answers = [cluster.post(path, {**body, "prompt": f"{i} {PROMPT}"}) for i in range(3)]
    assert time.monotonic() - started < 10
    expected = [unified.post(path, {**body, "prompt": f"{i} {PROMPT}"}) for i in range(3)]
    assert [rounded(a) for a in answers] == [rounded(e) for e in expected]


def test_the_command_killed_leaves_no_process(cluster: LiveServer) -> None:
    """kill -9 of `diptych pd` in the middle of an answer; the last of the tests that use this cluster."""
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    assert len(family) >= 2
    long = {"prompt": PROMPT, "max_tokens": 800, "temperature": 0, "ignore_eos": True, "stream": True}
    with (
        pytest.raises(httpx.TransportError),
        httpx.stream("POST", f"{cluster.url}/v1/completions", json=long, timeout=10) as response,
    ):
        chunks = response.iter_bytes()
        next(chunks)
        cluster.process.kill()
        for _ in chunks:
            pass
    cluster.process.wait()
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1], 5, "processes outlive the command that started them")


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    """A prefill and a decode engine without a router."""
    folders = [tmp_path_factory.mktemp(role) for role in ("prefill", "decode")]
    prefill_flags = (*ENGINE_FLAGS, "--role", "prefill", "--disaggregation-bootstrap-port", "0")
    with (
        run_server(folders[0], str(tiny_model), *prefill_flags, name="tiny-llama") as prefill,
        run_server(folders[1], str(tiny_model), *ENGINE_FLAGS, "--role", "decode", name="tiny-llama") as decode,
    ):
        yield prefill, decode


@pytest.fixture(params=ROUTERS)
def foreign_router(
    request: pytest.FixtureRequest, engines: tuple[LiveServer, LiveServer], tmp_path: Path
) -> Iterator[str]:
    """The URL of somebody else's router in PD mode before our engines."""
    if request.param == "vllm-router":
        pytest.importorskip("vllm_router")
    prefill, decode = engines
    registry = str(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    port = free_port()
    command = [
        sys.executable,
        *ROUTERS[request.param],
        "--policy",
        "round_robin",
        "--worker-startup-check-interval",
        "1",
    ]
    # vLLM's router asks no registry: prefill's answer names it.
    command += [
        "--prefill",
        prefill.url,
        *([] if request.param == "vllm-router" else [registry]),
        "--decode",
        decode.url,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with running(command, tmp_path / "router.log") as process:
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            assert process.poll() is None, (tmp_path / "router.log").read_text()
            try:
                body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 1}
                return httpx.post(f"{url}/v1/completions", json=body, timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_ready, 60, f"{request.param} did not get ready")
        yield url


@pytest.mark.parametrize("name", ["greedy", "one token", "a batch", "seeded", "logprobs", "chat", "native"])
def test_foreign_routers_drive_our_engines(foreign_router: str, unified: LiveServer, name: str) -> None:
    path, body = BODIES[name]
    response = httpx.post(foreign_router + path, json={"model": "tiny-llama", **body}, timeout=30)
    assert response.status_code == 200, response.text
    answer, expected = response.json(), unified.post(path, body)
    assert texts_of(answer) == texts_of(expected)


def texts_of(answer: Any) -> list[str]:
    if "choices" in answer:
        return [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    return [answer["text"]]


def test_foreign_routers_stream(foreign_router: str, unified: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{foreign_router}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny-llama", messages=[{"role": "user", "content": PROMPT}], max_tokens=9, temperature=0, stream=True
        )
        text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    path, body = BODIES["chat"]
    assert [text] == texts_of(unified.post(path, body))


def test_the_doctor_receives_from_a_peer(engines: tuple[LiveServer, LiveServer]) -> None:
    registry = engines[0].get("/server_info")["disaggregation_bootstrap_port"]
    command = [sys.executable, "-m", "diptych", "doctor", "--peer", f"127.0.0.1:{registry}"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert re.search(r"ok +transport +shm", text) and re.search(r"ok +prompt of 16 .* KiB in .* ms", text), text
    assert re.search(r"ok +16 KiB descriptors +[\d.]+ GB/s", text), text


def test_the_doctor_is_refused_as_an_engine_of_another_model_would_be(engines: tuple[LiveServer, LiveServer]) -> None:
    registry = engines[0].get("/server_info")["disaggregation_bootstrap_port"]

    async def ask() -> tuple[RankRoute, PrefillSummary]:
        async with open_session() as session:
            summary = await ask_registry(session, "127.0.0.1", registry, rank=-1, group=-1, kind=PrefillSummary)
            return await ask_registry(session, "127.0.0.1", registry, rank=0, group=0, kind=RankRoute), summary

    route, summary = asyncio.run(ask())
    other = msgspec.structs.replace(summary, fingerprint="another")
    with pytest.raises(PeerIncompatible, match=f"another.*{summary.fingerprint}|{summary.fingerprint}.*another"):
        receive_from(route, other, [16])


def test_what_apart_costs_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diptych", "bench", "pd", str(tiny_model), "--json", str(tmp_path / "pd.json")]
    command += ["--input-lens", "16,200", "--num-prompts", "3", "--output-len", "4", *ENGINE_FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unrouted adds" in done.stdout
    rows = json.loads((tmp_path / "pd.json").read_text())["rows"]
    assert [row["input_len"] for row in rows] == [16, 200] and all(row["moved_nbytes"] > 0 for row in rows)
    assert all(door["ttft_ms"]["count"] == 3 and not door["failures"] for row in rows for door in row["doors"].values())
