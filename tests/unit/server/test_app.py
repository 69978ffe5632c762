"""The application around the generating routes, and `serve` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.config import EngineConfig, ServerConfig
from diptych.errors import ConfigError
from diptych.metrics import ServerMetrics
from diptych.server.app import bind, create_app
from diptych.server.routes import ROUTES
from diptych.server.state import ServerState

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


# -- while loading, and when the engine is gone


async def test_everything_is_503_while_loading():
    config = EngineConfig(server=ServerConfig(served_model_name="fake"))
    app = create_app(ServerState(config, ServerMetrics("vllm", "fake")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        for path in ("/health", "/ready", "/ping", "/health_generate", "/server_info", "/get_load", "/tokenizer_info"):
            response = await http.get(path)
            assert response.status_code == 503 and "retry-after" in response.headers, path
        assert (await http.get("/health")).content == b""
        response = await http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503 and "loading" in response.json()["error"]["message"]
        for path in ("/version", "/metrics", "/v1/models", "/openapi.json", "/load"):
            assert (await http.get(path)).status_code == 200, path


async def test_health_follows_the_engine_and_the_drain(world):
    assert (await world.http.get("/health")).status_code == 200
    assert (await world.http.get("/health_generate")).status_code == 200
    world.state.is_draining = True
    assert (await world.http.get("/health")).status_code == 503
    assert (await world.http.post("/generate", json={"text": "a"})).status_code == 503
    world.state.is_draining = False
    world.engine.die("broken")
    await world.until(lambda: not world.client.is_alive)
    assert (await world.http.get("/health")).status_code == 503
    assert (await world.http.get("/metrics")).status_code == 200


# -- errors of the protocol


async def test_unknown_paths_and_methods_have_nested_bodies(world):
    for response, status in (
        (await world.http.get("/nope"), 404),
        (await world.http.get("/v1/completions"), 405),
        (await world.http.delete("/health"), 405),
        (await world.http.get("/v1/models/nope"), 404),
    ):
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"]
    assert "POST" in (await world.http.get("/v1/completions")).headers["allow"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"3", b'"a"', b"\xff\xfe",
        b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 50_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"])
async def test_malformed_json_is_a_400(world, path, body):
    response = await world.http.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("depth", [200, 400, 1000])
async def test_deep_nesting_is_no_500(world, depth):
    deep = "[" * depth + "]" * depth
    for body in (
        f'{{"prompt": "a", "max_tokens": 1, "guided_json": {{"enum": {deep}}}}}',
        f'{{"prompt": {deep}}}',
    ):
        assert (await world.http.post("/v1/completions", content=body)).status_code in (200, 400)
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"enum": {deep}}}}}}}'
    for choice in ('"auto"', '"required"'):
        messages = '[{"role": "user", "content": "a"}]'
        body = f'{{"messages": {messages}, "max_tokens": 1, "tools": [{tool}], "tool_choice": {choice}}}'
        assert (await world.http.post("/v1/chat/completions", content=body)).status_code in (200, 400)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted(
    {name for route in ROUTES if route.body for name in route.body.model_fields} | {"max_new_tokens", "sampling_seed"}
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    path=st.sampled_from([route.path for route in ROUTES if "POST" in route.methods and route.body is not None]),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
def test_any_json_is_answered_without_a_500(post_anything, path, body):
    """Property: whatever values the known fields have, the answer is no 5xx."""
    base = {"prompt": "ab", "messages": [{"role": "user", "content": "a"}], "text": "a", "max_tokens": 1, "tokens": [1]}
    status, text = post_anything(path, json.dumps({**base, **body}).encode())
    assert status in (200, 400, 404), text


@pytest.fixture(scope="module")
def post_anything(make_world) -> Iterator[Callable[[str, bytes], tuple[int, str]]]:
    """Posts to a server that lives for the whole module, from synchronous code."""
    with asyncio.Runner() as runner:
        world_context = make_world()
        world = runner.run(world_context.__aenter__())

        def post(path: str, content: bytes) -> tuple[int, str]:
            response = runner.run(world.http.post(path, content=content))
            return response.status_code, response.text

        yield post
        runner.run(world_context.__aexit__(None, None, None))


async def test_large_bodies_are_refused_early(make_world):
    async with make_world(max_body_size="10KiB") as world:
        response = await world.http.post("/v1/completions", json={"prompt": "x" * 20_000})
        assert response.status_code == 413 and response.json()["error"]["code"]

        async def chunks():
            for _ in range(100):
                yield b"x" * 1000

        assert (await world.http.post("/generate", content=chunks())).status_code == 413


async def test_ten_megabytes_do_not_block_the_others(tcp_world):
    prompt = "word " * 2_000_000
    slow = asyncio.create_task(tcp_world.http.post("/v1/completions", json={"prompt": prompt}))
    worst = 0.0
    while not slow.done():
        started = time.perf_counter()
        assert (await tcp_world.http.get("/health")).status_code == 200
        worst = max(worst, time.perf_counter() - started)
    assert slow.result().status_code == 400 and slow.result().json()["error"]["code"] == "context_length_exceeded"
    assert worst < 1.0


# -- the API key


async def test_api_key_guards_all_but_health_and_metrics(make_world):
    async with make_world(api_key="s3cret") as world:
        for path in ("/health", "/ready", "/ping", "/metrics", "/health_generate"):
            assert (await world.http.get(path)).status_code == 200, path
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer "},
        ):
            for path in ("/v1/models", "/version", "/server_info", "/openapi.json", "/nope"):
                response = await world.http.get(path, headers=headers)
                assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
        good = {"Authorization": "Bearer s3cret"}
        assert (await world.http.get("/v1/models", headers=good)).status_code == 200
        info = await world.http.get("/server_info", headers=good)
        assert info.status_code == 200 and "s3cret" not in info.text


# -- what routers and operators read


async def test_information_routes(world):
    models = (await world.http.get("/v1/models")).json()
    assert models["data"][0]["id"] == "fake" and models["data"][0]["max_model_len"] == 4096
    assert (await world.http.get("/v1/models/fake")).json()["object"] == "model"
    for path in ("/model_info", "/get_model_info"):
        body = (await world.http.get(path)).json()
        assert body["is_generation"] is True and body["architectures"] == ["FakeForCausalLM"]
    for path in ("/server_info", "/get_server_info"):
        body = (await world.http.get(path)).json()
        assert (body["tp_size"], body["max_total_num_tokens"], body["served_model_name"]) == (1, 512 * 16, "fake")
        assert "last_gen_throughput" in body["internal_states"][0]
    info = (await world.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "</s>" and "chat_template" in info


async def test_load_routes(world):
    load = (await world.http.get("/v1/loads", params={"include": "core,queues,memory,disagg"})).json()["loads"][0]
    assert load["num_waiting_reqs"] == 2 and load["num_used_tokens"] == 64 * 16 and load["token_usage"] == 0.125
    assert load["cache_hit_rate"] == 0.25 and load["utilization"] == 0.25
    assert load["memory"]["num_free_pages"] == 400 and load["queues"]["waiting"] == 2
    assert (await world.http.get("/get_load")).json()[0]["num_waiting_reqs"] == 2
    assert (await world.http.get("/load")).json() == {"server_load": 0}


async def test_abort_request_by_rid(world):
    world.engine.step_s = 0.01
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 4000}, "rid": "mine"}
    task = asyncio.create_task(world.http.post("/generate", json=body))
    other = asyncio.create_task(world.http.post("/generate", json={**body, "rid": "other"}))
    await world.until(lambda: len(world.engine.open) == 2)
    assert (await world.http.post("/abort_request", json={"rid": "unheard-of"})).status_code == 200
    assert (await world.http.post("/abort_request", json={"rid": "mine"})).status_code == 200
    response = await task
    assert response.status_code == 200 and response.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert not other.done()
    assert (await world.http.post("/abort_request", json={"abort_all": True})).status_code == 200
    assert (await other).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_flush_cache(world):
    for response in (await world.http.post("/flush_cache"), await world.http.get("/flush_cache?timeout=60.0")):
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    world.engine.is_idle_for_flush = False
    assert (await world.http.post("/flush_cache?timeout=0.3")).status_code == 400
    assert world.engine.flushes >= 4
    for timeout in ("nan", "x", "-1", "1e9"):
        assert (await world.http.post(f"/flush_cache?timeout={timeout}")).status_code == 400


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(world, prefix):
    body = (await world.http.post(f"{prefix}/tokenize", json={"prompt": "h\u00e9"})).json()
    assert body["count"] == 3 and body["max_model_len"] == 4096
    text = (await world.http.post(f"{prefix}/detokenize", json={"tokens": body["tokens"]})).json()
    assert text["prompt"] == text["text"] == "h\u00e9"
    chat = await world.http.post(f"{prefix}/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["count"] > 2
    assert (await world.http.post(f"{prefix}/tokenize", json={})).status_code == 400
    assert (await world.http.post(f"{prefix}/detokenize", json={"tokens": [99999]})).status_code == 400


async def test_metrics_are_fresh(world):
    await world.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
    text = (await world.http.get("/metrics")).text
    for line in (
        'vllm:num_requests_waiting{engine="0",model_name="fake"} 2.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0.125',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"} 1.0',
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="fake"} 1.0',
        'vllm:cache_config_info{block_size="16",engine="0",model_name="fake",num_gpu_blocks="512"} 1.0',
    ):
        assert line in text
    assert (await world.http.head("/metrics")).status_code == 200


async def test_openapi_names_every_route(world):
    document = (await world.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    for route in ROUTES:
        assert route.path.replace(":path", "") in document["paths"]
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    assert "prompt" in document["components"]["schemas"][name]["properties"]


# -- serve as a process


def test_port_in_use_is_a_config_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another --port"):
        bind(ServerConfig(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError):
        bind(ServerConfig(host="no.such.host.invalid"))


SERVE = """
import sys
from diptych.config import EngineConfig, ModelConfig, ServerConfig
from diptych.log import setup_logging
from diptych.server.app import serve
from diptych.errors import ConfigError

setup_logging("server", "info")
config = EngineConfig(
    model=ModelConfig(model_path=sys.argv[1]),
    server=ServerConfig(port=0, served_model_name="fake", drain_timeout=float(sys.argv[3])),
)
try:
    sys.exit(serve(config, engine_command=(sys.executable, sys.argv[2])))
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


class Server:
    """`serve` in a process of its own."""

    def __init__(self, model_path: Path, drain_timeout_s: float = 5.0) -> None:
        arguments = [sys.executable, "-c", SERVE, str(model_path), str(FAKE_ENGINE), str(drain_timeout_s)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = ""

    def wait_ready(self) -> list[str]:
        """The banner."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(5)]
        self.url = lines[0].split(" at ")[1].strip()
        return lines

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def finish(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, error = self.process.communicate(timeout=20)
        return self.process.returncode, error


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_drains_and_leaves_no_child(tokenizer_folder, number):
    server = Server(tokenizer_folder)
    banner = server.wait_ready()
    assert "8,192 tokens" in banner[3] and "curl http://127.0.0.1:" in banner[4]
    children = server.children()
    body = {"prompt": "abc", "max_tokens": 40, "stream": True}
    with httpx.Client(base_url=server.url) as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(number)
        time.sleep(0.1)
        with httpx.Client(base_url=server.url) as second:
            assert second.get("/health").status_code == 503
            assert second.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    code, error = server.finish()
    assert code == 0, error
    assert "Traceback" not in error
    assert children and not any(is_running(pid) for pid in children)


def test_second_signal_stops_at_once(tokenizer_folder):
    server = Server(tokenizer_folder, drain_timeout_s=60)
    server.wait_ready()
    body = {"prompt": "abc", "max_tokens": 4000, "stream": True}
    with httpx.Client(base_url=server.url) as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGINT)
        started = time.monotonic()
        code, error = server.finish()
        lines.close()
    assert code == 0 and time.monotonic() - started < 5, error


def test_engine_crash_ends_the_server_with_a_message(tokenizer_folder):
    server = Server(tokenizer_folder)
    server.wait_ready()
    os.kill(server.children()[0], signal.SIGKILL)
    code, error = server.finish()
    assert code == 1 and "ended unexpectedly" in error and "Traceback" not in error


def test_a_model_that_cannot_be_served_is_a_config_error(tmp_path, tokenizer_folder):
    folder = tmp_path / "refuse-to-start"
    folder.symlink_to(tokenizer_folder)
    code, error = Server(folder).finish()
    assert code == 2 and "no such model" in error and "Traceback" not in error


def test_engine_that_dies_at_start_is_reported(tmp_path, tokenizer_folder):
    folder = tmp_path / "die-at-once"
    folder.symlink_to(tokenizer_folder)
    code, error = Server(folder).finish()
    assert code == 1 and "exit code 7" in error and "Traceback" not in error
