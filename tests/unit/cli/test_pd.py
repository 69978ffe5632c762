"""`diptych pd`: what it makes of its flags, and its whole life as processes, on scripted engines."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from diptych.cli import pd
from diptych.cli.flags import flag_names
from diptych.config import EngineConfig, ModelConfig, ParallelConfig, ServerConfig
from diptych.errors import ConfigError
from diptych.router.config import Role

PD_FAKE = Path(__file__).with_name("pd_fake.py")
START_S, STOP_S = 60.0, 20.0


# -- flags


def test_flags_beside_those_of_an_engine():
    assert [name for name in flag_names(pd.PdFlags) if name not in flag_names()] == [
        "--model",
        "--config",
        "--prefill",
        "--decode",
        "--policy",
        "--prefill-tp",
        "--decode-tp",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "0"], "--prefill must be at least 1, got 0"),
        (["--decode", "-1"], "--decode must be at least 1, got -1"),
        (["--role", "decode"], "--role is chosen for each engine"),
        (["--peer-port", "5"], "--peer-port is chosen for each engine"),
        (["--nnodes", "2"], "`diptych pd` runs on one machine, but nnodes is 2"),
        (["--decode-tp", "2", "--prefill-tp", "2", "--dp", "3"], "dp_size 3 does not divide tp_size 1"),
        (["--prefil", "1"], "did you mean --prefill?"),
        (["no/such/model"], "model path no/such/model does not exist"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(arguments, message):
    with pytest.raises(ConfigError) as raised:
        pd.run(arguments)
    assert message in str(raised.value)


def test_every_engine_gets_its_share(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = EngineConfig(server=ServerConfig(host="0.0.0.0", port=1234, api_key="k"))
    engines = pd.engine_configs(config, num_prefill=1, num_decode=2)
    assert [(name, role) for name, role, _ in engines] == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    for _, role, engine in engines:
        assert (engine.server.host, engine.server.port, engine.server.api_key) == ("127.0.0.1", 0, "k")
        assert engine.transfer.role == role and engine.transfer.disaggregation_bootstrap_port == 0
        assert engine.model.num_threads == 2 and engine.cache.mem_sharers == 3
    router = pd.router_config(config, "random")
    assert (router.host, router.port, router.api_key, router.policy) == ("0.0.0.0", 1234, "k", "random")


def test_given_threads_are_kept(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for given, expected in ((3, 3), (None, 1)):
        config = EngineConfig(model=ModelConfig(num_threads=given))
        assert pd.engine_configs(config, num_prefill=1, num_decode=1)[0][2].model.num_threads == expected


def test_prefill_and_decode_may_have_unlike_sizes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)))
    engines = pd.engine_configs(EngineConfig(), num_prefill=1, num_decode=2, decode_tp=2)
    assert [engine.parallel.tp_size for _, _, engine in engines] == [1, 2, 2]
    assert {engine.model.num_threads for _, _, engine in engines} == {2}
    both = pd.engine_configs(
        EngineConfig(parallel=ParallelConfig(tp_size=4, pp_size=2)), num_prefill=1, num_decode=1, prefill_tp=1
    )
    assert [engine.parallel.world_size for _, _, engine in both] == [2, 8]


# -- processes


@dataclass
class Running:
    """A cluster that runs, or has been started at least."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    def wait_for(self, condition: Callable[[], object], timeout_s: float = START_S):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return value

    def wait_for_url(self) -> str:
        def found():
            assert self.process.poll() is None, self.log
            return re.search(r"serves fake at (http://\S+),", self.out)

        return self.wait_for(found)[1]

    def pid_of(self, name: str) -> int:
        return int(re.search(rf"{name} serves at \S+ \(process (\d+)\)", self.log)[1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A model folder for scripted engines: tokens are bytes."""
    folder = tmp_path_factory.mktemp("byte-tokenizer")
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def start(tokenizer_folder, tmp_path):
    """`with start(*flags) as cluster:`; no process may be left when it ends."""

    @contextmanager
    def started(*flags: str, model: str = "") -> Iterator[Running]:
        command = [sys.executable, str(PD_FAKE), model or str(tokenizer_folder), "--port", "0", *flags]
        command += ["--served-model-name", "fake", "--drain-timeout", "5"]
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        family: list[psutil.Process] = []
        try:
            cluster = Running(process, tmp_path)
            yield cluster
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            _, alive = psutil.wait_procs(family, timeout=5)
            for child in alive:
                child.kill()
        assert not alive

    return started


def test_the_life_of_a_cluster(start):
    with start("--decode", "2") as cluster:
        url = cluster.wait_for_url()
        assert all(name in cluster.out for name in ("prefill-0", "decode-0", "decode-1", "curl"))
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        assert len(family) == 6  # a server and an engine each
        with httpx.Client(base_url=url, timeout=10) as http:
            assert http.get("/health").status_code == http.get("/ready").status_code == 200
            roles = sorted(worker["role"] for worker in http.get("/workers").json()["workers"])
            assert roles == ["decode", "decode", "prefill"]
            answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4})
            assert answer.json()["choices"][0]["text"] == "abab"
        assert re.search(r"decode-[01]  \| .*prefill by 127.0.0.1:9", cluster.log)
        assert cluster.stop() == 0
        assert not psutil.wait_procs(family, timeout=5)[1]
        assert "Traceback" not in cluster.log and "ERROR" not in cluster.log


def test_ctrl_c_lets_requests_finish(start):
    with start() as cluster:
        url = cluster.wait_for_url()
        body = {"prompt": "ab", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
            events = response.iter_lines()
            next(events)
            cluster.process.send_signal(signal.SIGINT)
            assert list(events)[-2:] == ["data: [DONE]", ""]
        assert cluster.process.wait(STOP_S) == 0


def test_a_dead_engine_is_reported_and_the_others_go_on(start):
    with start() as cluster:
        url = cluster.wait_for_url()
        os.kill(cluster.pid_of("prefill-0"), signal.SIGKILL)
        cluster.wait_for(lambda: "prefill-0 has ended unexpectedly (exit code -9)" in cluster.log, 5)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 4}, timeout=10)
        assert answer.status_code == 200
        os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
        assert cluster.process.wait(STOP_S) == 1
        assert "no request can be served any more" in cluster.log


def test_nothing_outlives_a_killed_parent(start):
    with start() as cluster:
        cluster.wait_for_url()
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        cluster.process.kill()
        cluster.process.wait()
        assert not psutil.wait_procs(family, timeout=5)[1]


def test_an_engine_that_cannot_start_ends_all(start, tokenizer_folder, tmp_path):
    folder = tmp_path / "refuse-to-start"
    folder.symlink_to(tokenizer_folder)
    with start(model=str(folder)) as cluster:
        assert cluster.process.wait(START_S) == 1
        assert "no such model" in cluster.log and "ended with exit code 2 before all were ready" in cluster.log
        assert cluster.out == ""


def test_a_stop_while_loading_is_clean(start):
    with start() as cluster:
        cluster.wait_for(lambda: "prefill registry" in cluster.log)
        assert cluster.stop() == 0


def test_a_taken_port_is_found_before_anything_starts(tokenizer_folder):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [sys.executable, str(PD_FAKE), str(tokenizer_folder), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in done.stderr
