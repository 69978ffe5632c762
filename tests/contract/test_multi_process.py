"""Engines of several ranks, each a real process with the toy worker: what they answer, and how they end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from diptych.config import EngineConfig, ParallelConfig, SchedulerConfig, TransferConfig
from diptych.core.calls import CallDone, GetWeights
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import (
    AddRequest,
    Drain,
    EngineInfo,
    Fatal,
    FromEngine,
    Loading,
    Ready,
    RequestFailed,
    RequestOutputs,
    ToEngine,
)
from diptych.core.request import Request, SamplingParams
from diptych.engine import multi_process, node
from diptych.engine.engine import EngineCore
from diptych.engine.multi_process import MultiProcessExecutor
from diptych.engine.rank_sockets import RankInbox
from diptych.engine.toy import expected_output
from diptych.errors import ConfigError, RankLost
from diptych.resolve import validate

TOY = (sys.executable, str(Path(__file__).with_name("toy_rank.py")))
# Far less than `dist_timeout`, after which silence alone would tell; and time enough for a busy machine.
LOST_S = 15.0


class Engine:
    """An EngineCore on a thread over toy ranks, and the server's end of its channel."""

    def __init__(self, folder: Path, parallel: ParallelConfig, cluster_key: str | None = None) -> None:
        self.folder = folder
        self.config = EngineConfig(
            parallel=parallel,
            scheduler=SchedulerConfig(check_invariants=True),
            transfer=TransferConfig(cluster_key=cluster_key),
        )
        validate(self.config)
        self.executor = MultiProcessExecutor(self.config, folder=folder, command=TOY)
        self.messages: list[FromEngine] = []
        self.status: int | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel: Channel[ToEngine, FromEngine] = Channel(
            open_socket(self._context, "inproc://engine", bind=True), FromEngine
        )
        inner: Channel[FromEngine, ToEngine] = Channel(
            open_socket(self._context, "inproc://engine", bind=False), ToEngine
        )
        self.core = EngineCore(self.config, self.executor, inner)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.status = self.core.run()

    def wait_for(self, kind: type, timeout_s: float = 20.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.messages += self.channel.receive_all()
            for message in self.messages:
                if isinstance(message, kind):
                    return message
            self.channel.socket.poll(20)
        raise AssertionError(f"no {kind.__name__} in {self.messages}")

    def wait_for_tokens(self) -> None:
        """Until a step has been computed: the first `RequestOutputs` only report the load."""
        deadline = time.monotonic() + 20
        while not any(isinstance(message, RequestOutputs) and message.outputs for message in self.messages):
            assert time.monotonic() < deadline, self.messages
            self.channel.socket.poll(20)
            self.messages += self.channel.receive_all()

    def start_requests(self, count: int, **sampling: object) -> list[Request]:
        requests = [
            Request(
                request_id=f"r{index}",
                prompt_token_ids=[3, 1, 4, 1, 5, index],
                sampling=SamplingParams(**{"max_tokens": 9, **sampling}),
            )
            for index in range(count)
        ]
        for request in requests:
            self.channel.send(AddRequest(request))
        return requests

    def output_of(self, request: Request) -> list[int]:
        """Its tokens, once it has ended."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            self.messages += self.channel.receive_all()
            outputs = [
                output
                for message in self.messages
                if isinstance(message, RequestOutputs)
                for output in message.outputs
                if output.request_id == request.request_id
            ]
            if outputs and outputs[-1].finish_reason is not None:
                return [token for output in outputs for token in output.token_ids]
            self.channel.socket.poll(20)
        raise AssertionError(f"{request.request_id} was not answered")

    def close(self) -> None:
        pids = self.executor.pids
        if self.thread.is_alive():
            self.channel.send(Drain(0.0))
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.channel.close()
        self._context.term()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        assert not list(self.folder.iterdir())


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start(parallel: ParallelConfig, cluster_key: str | None = None) -> Engine:
        engines.append(Engine(tmp_path, parallel, cluster_key))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (2, 2, 1), (4, 1, 2)])
def test_many_ranks_answer_as_one(start: Start, tp: int, pp: int, dp: int) -> None:
    engine = start(ParallelConfig(tp_size=tp, pp_size=pp, dp_size=dp))
    ready = engine.wait_for(Ready)
    assert ready.info.num_pages == 64, "the poorest rank decides"
    assert ready.info.load_s == tp * pp - 1
    assert engine.wait_for(Loading) == Loading("weights", 1, 2)
    for request in engine.start_requests(12):
        assert engine.output_of(request) == expected_output(request, vocab_size=50, max_len=128, eos_token_ids=(7,))
    engine.channel.send(Drain(5.0))
    engine.thread.join(10)
    assert engine.status == 0


@pytest.mark.parametrize(
    ("rank", "number", "what", "moment"),
    [
        (0, signal.SIGKILL, "was killed by SIGKILL", "loading"),
        (0, signal.SIGKILL, "was killed by SIGKILL", "computing"),
        (0, signal.SIGSTOP, "is stopped (SIGSTOP?)", "idle"),
        (1, signal.SIGKILL, "was killed by SIGKILL", "idle"),
        (1, signal.SIGSTOP, "is stopped (SIGSTOP?)", "loading"),
        (1, signal.SIGSTOP, "is stopped (SIGSTOP?)", "computing"),
    ],
)
def test_a_rank_that_is_lost_ends_the_engine(
    start: Start, monkeypatch, rank: int, number: int, what: str, moment: str
) -> None:
    if moment == "loading":
        monkeypatch.setenv("TOY_FAULT", "1:hang-load")
    if moment == "computing":
        monkeypatch.setenv("TOY_STEP_S", "0.02")
    engine = start(ParallelConfig(tp_size=2))
    engine.wait_for(Loading if moment == "loading" else Ready)
    requests = engine.start_requests(3, max_tokens=100, ignore_eos=True) if moment == "computing" else []
    if requests:
        engine.wait_for_tokens()
    pid = engine.executor.pids[rank]
    began = time.monotonic()
    os.kill(pid, number)
    fatal = engine.wait_for(Fatal)
    assert time.monotonic() - began < LOST_S
    assert fatal == Fatal(f"rank {rank} (process {pid}) {what}; the engine must be restarted", "RankLost")
    failed = {message.request_id for message in engine.messages if isinstance(message, RequestFailed)}
    assert failed == {request.request_id for request in requests}
    engine.thread.join(5)
    assert engine.status == 1


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("1:refuse-load", "ConfigError", "rank 1: the model is too large"),
        ("0:fail-load", "InvariantError", "rank 0: ValueError: no weights"),
        ("1:fail-step", "WorkerError", "rank 1: out of memory"),
    ],
)
def test_a_rank_that_fails_says_why(start: Start, monkeypatch, fault: str, kind: str, message: str) -> None:
    monkeypatch.setenv("TOY_FAULT", fault)
    engine = start(ParallelConfig(tp_size=2))
    if "step" in fault:
        engine.wait_for(Ready)
        engine.start_requests(1)
    assert engine.wait_for(Fatal) == Fatal(message, kind)


def test_a_command_that_does_not_run_is_a_lost_rank(tmp_path: Path) -> None:
    executor = MultiProcessExecutor(
        EngineConfig(parallel=ParallelConfig(tp_size=2)), folder=tmp_path, command=(sys.executable, "-c", "pass")
    )
    executor.start()
    with pytest.raises(RankLost, match=r"rank [01] \(process \d+\) has ended with exit code 0; its log says why"):
        wait_for_news(executor.poll_loading)
    executor.shutdown()


def test_groups_have_no_peers_yet(tmp_path: Path) -> None:
    config = EngineConfig(parallel=ParallelConfig(tp_size=2, dp_size=2), transfer=TransferConfig(role="decode"))
    executor = MultiProcessExecutor(config, folder=tmp_path, command=TOY)
    with pytest.raises(ConfigError, match="role decode with dp_size 2 is not served yet"):
        executor.start()
    executor.shutdown()


def wait_for_news(poll: Callable[[], object]) -> object:
    deadline = time.monotonic() + 20
    while (news := poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return news


@pytest.mark.parametrize("refusing", [None, 1])
def test_a_call_is_done_when_all_ranks_have_obeyed(tmp_path: Path, monkeypatch, refusing: int | None) -> None:
    monkeypatch.setenv("TOY_FAULT", f"{refusing}:refuse-call")
    executor = MultiProcessExecutor(EngineConfig(parallel=ParallelConfig(tp_size=3)), folder=tmp_path, command=TOY)
    executor.start()
    try:
        while not isinstance(wait_for_news(executor.poll_loading), EngineInfo):
            pass
        executor.call(5, GetWeights(["w"]))
        expected = CallDone(5, value=b"\0") if refusing is None else CallDone(5, "Unsupported", "not here")
        assert wait_for_news(executor.poll) == expected
        assert executor.poll() is None
    finally:
        executor.shutdown()


TOY_NODE = """
import sys, msgspec
from diptych.config import EngineConfig
from diptych.cli.main import guarded
from diptych.engine.node import run_node
from diptych.log import setup_logging
setup_logging("node", "info")
config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
sys.exit(guarded(lambda: run_node(config, command=(sys.executable, sys.argv[1]))))
"""


class ToyNode:
    """The second of two nodes, as a process."""

    def __init__(self, parallel: ParallelConfig, log: Path, cluster_key: str | None = None) -> None:
        self._log = log
        config = EngineConfig(
            parallel=replace(parallel, node_rank=1),
            scheduler=SchedulerConfig(check_invariants=True),
            transfer=TransferConfig(cluster_key=cluster_key),
        )
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TOY_NODE, TOY[1]], stdin=subprocess.PIPE, stderr=file
            )
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(msgspec.json.encode(config))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def two_nodes(start: Start, tmp_path_factory) -> Iterator[Callable[..., tuple[Engine, ToyNode]]]:
    nodes: list[ToyNode] = []

    def start_both(*, cluster_key: str | None = None, **theirs: object) -> tuple[Engine, ToyNode]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        parallel = ParallelConfig(tp_size=1, pp_size=2, nnodes=2, dist_init_addr=address)
        log = tmp_path_factory.mktemp("node") / "log"
        nodes.append(ToyNode(replace(parallel, **theirs), log, cluster_key))
        return start(parallel, cluster_key=cluster_key), nodes[-1]

    yield start_both
    for each in nodes:
        each.close()


@pytest.mark.parametrize("cluster_key", [None, "secret"])
def test_two_nodes_are_one_engine(two_nodes, cluster_key: str | None) -> None:
    engine, second = two_nodes(cluster_key=cluster_key)
    engine.wait_for(Ready)
    assert len(engine.executor.pids) == 1
    (rank,) = second.ranks()
    for request in engine.start_requests(3):
        assert engine.output_of(request) == expected_output(request, vocab_size=50, max_len=128, eos_token_ids=(7,))
    engine.channel.send(Drain(5.0))
    assert second.process.wait(10) == 0
    assert not rank.is_running()
    assert "running ranks 1" in second.log


@pytest.mark.parametrize(
    ("whom", "number", "message"),
    [
        ("rank", signal.SIGKILL, r"rank 1 \(process \d+\) was killed by SIGKILL; "),
        ("rank", signal.SIGSTOP, r"rank 1 \(process \d+\) is stopped \(SIGSTOP\?\); "),
        ("node", signal.SIGKILL, "node 1 says nothing for 3 s; "),
        ("node", signal.SIGSTOP, "node 1 says nothing for 3 s; "),
        ("node", signal.SIGTERM, "node 1 was told to end; "),
    ],
)
def test_what_is_lost_on_another_node_ends_all(two_nodes, whom: str, number: int, message: str) -> None:
    engine, second = two_nodes()
    engine.wait_for(Ready)
    (rank,) = second.ranks()
    began = time.monotonic()
    os.kill(rank.pid if whom == "rank" else second.process.pid, number)
    assert re.match(message, engine.wait_for(Fatal).message)
    assert time.monotonic() - began < LOST_S
    if (whom, number) == ("node", signal.SIGSTOP):
        os.kill(second.process.pid, signal.SIGCONT)
    second.process.wait(10)
    psutil.wait_procs([rank], timeout=LOST_S)
    assert not rank.is_running()


def test_a_node_ends_with_the_first(two_nodes, monkeypatch) -> None:
    engine, second = two_nodes()
    engine.wait_for(Ready)
    (rank,) = second.ranks()
    monkeypatch.setattr(RankInbox, "send", lambda *_: None)  # it goes without a word
    monkeypatch.setattr(multi_process, "END_GRACE_S", 0.0)
    engine.channel.send(Drain(0.0))
    assert second.process.wait(10) == 1
    assert "node 0 at 127.0.0.1" in second.log
    assert not rank.is_running()


def test_nodes_that_differ_refuse_each_other(two_nodes) -> None:
    engine, second = two_nodes(ep_size=1, tp_size=2)
    fatal = engine.wait_for(Fatal)
    assert fatal == Fatal(
        "node 1 differs from node 0: tp_size is 2 there and 1 here; give all nodes the same settings", "ConfigError"
    )
    assert second.process.wait(10) == 2
    assert fatal.message in second.log


def test_a_node_waits_for_the_first_only_so_long(two_nodes, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node, "NODE_JOIN_S", 0.2)
    parallel = ParallelConfig(tp_size=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:1")
    alone = node.Node(EngineConfig(parallel=parallel), TOY)
    with pytest.raises(ConfigError, match=r"node 0 did not answer at 127\.0\.0\.1:1 within 0\.2 s"):
        alone.run()
    alone.close()


def test_the_first_node_waits_for_the_others_only_so_long(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(multi_process, "NODE_JOIN_S", 0.2)
    parallel = ParallelConfig(tp_size=2, nnodes=2, dist_init_addr="127.0.0.1:27001")
    executor = MultiProcessExecutor(EngineConfig(parallel=parallel), folder=tmp_path, command=TOY)
    executor.start()
    with pytest.raises(ConfigError, match=r"node-1 did not come within 0\.2 s to 127\.0\.0\.1:27001"):
        wait_for_news(executor.poll_loading)
    executor.shutdown()
