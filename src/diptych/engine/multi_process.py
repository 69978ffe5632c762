"""One process a rank: the executor of an engine that is spread over several.

Every rank gets every batch and call, in order. Results come from rank 0 of the last stage, errors from all; a call is
answered once all ranks have obeyed. A rank that dies, is stopped or fails ends the engine: half a group cannot go on.
The ranks of other nodes are started there (`engine.node`) and connect like those of this one. Engine thread, and a
thread that watches the processes; never imports torch.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from diptych.config import EngineConfig
from diptych.core.batch import Batch, StepOutput
from diptych.core.calls import CallDone, SubmittedCall, WorkerCall
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import EngineInfo, Loading
from diptych.core.ranks import (
    AgentFrame,
    End,
    FromRank,
    NodeHello,
    NodeLeaves,
    ProcessLost,
    RankFailed,
    RankLoaded,
    RankProgress,
    Refused,
    RunStep,
    StartRanks,
    StepDone,
    ToRank,
)
from diptych.engine.executor import Executor, InProcessExecutor
from diptych.engine.rank_process import RANK_COMMAND, RankProcesses, rank_starts
from diptych.engine.rank_sockets import RankInbox
from diptych.engine.rank_troubles import SignsOfLife, Troubles
from diptych.engine.roles import check_role
from diptych.engine.spread import difference, meeting_place, node_endpoint, node_settings, rank_endpoint
from diptych.errors import ConfigError
from diptych.resolve import data_parallel_ranks, placement

logger = logging.getLogger(__name__)

NODE_JOIN_S = 600.0
NODE_SILENCE_S = 3.0
# How long to wait for the cause once a rank has said that another is lost.
SETTLE_LOST_S = 2.0
SETTLE_SPREAD_S = NODE_SILENCE_S + 1.0
END_GRACE_S = 3.0
_WATCH = "inproc://rank-watch"


def create_executor(config: EngineConfig, folder: Path | None = None) -> Executor:
    """What runs the engine's workers. Args: folder: for sockets, private and short-lived; None: one is made."""
    if config.parallel.world_size == 1:
        return InProcessExecutor(config)
    return MultiProcessExecutor(config, folder=folder)


class MultiProcessExecutor:
    """All ranks of an engine, from node 0.

    Args: config: resolved. folder: as in `create_executor`. command: how to run a rank; it is told its `RankStart` on
    standard input.
    """

    def __init__(
        self, config: EngineConfig, *, folder: Path | None = None, command: tuple[str, ...] = RANK_COMMAND
    ) -> None:
        parallel = config.parallel
        self._config = config
        self._command = command
        self._placement = placement(parallel)
        self._is_spread = self._placement.nnodes > 1
        self._names = [f"rank-{rank}" for rank in range(parallel.world_size)]
        self._nodes = [f"node-{node}" for node in range(1, self._placement.nnodes)]
        self._groups = [[self._names[rank] for rank in ranks] for ranks in data_parallel_ranks(parallel)]
        self._results: list[deque[StepOutput]] = [deque() for _ in self._groups]
        self._folder = Path(tempfile.mkdtemp(prefix="diptych-", dir=folder))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = RankInbox(self._context, config.transfer.cluster_key if self._is_spread else None)
        self._processes: RankProcesses | None = None
        self._watch: Channel[FromRank, ToRank] | None = None
        self._troubles = Troubles()
        self._signs = SignsOfLife()
        self._started_at = 0.0
        self._offers: set[str] = set()
        self._infos: dict[int, EngineInfo] = {}
        self._calls: dict[int, dict[int, CallDone]] = {}
        self._on_agent_frame: Callable[[int, bytes], None] | None = None
        self.last_step = -1
        self._news: deque[Loading | EngineInfo | StepOutput | CallDone] = deque()

    @property
    def wake_fd(self) -> zmq.Socket[bytes]:
        return self._inbox.socket

    @property
    def pids(self) -> list[int]:
        """Process ids of this node's ranks."""
        return [] if self._processes is None else self._processes.pids

    def start(self) -> None:
        check_role(self._config)
        self._started_at = time.monotonic()
        self._inbox.bind(_WATCH)
        if self._is_spread:
            address = self._config.parallel.dist_init_addr or ""
            self._inbox.bind(node_endpoint(address))
            logger.info("waiting for %d other nodes at %s", len(self._nodes), address)
        else:
            self._inbox.bind(self._endpoint)
            self._start_ranks()

    def poll_loading(self) -> Loading | EngineInfo | None:
        news = self._take()
        assert not isinstance(news, StepOutput | CallDone), "a step finished before loading did"
        return news

    def submit(self, batch: Batch) -> None:
        for group, names in zip(batch.groups or [batch], self._groups, strict=True):
            self._inbox.send(RunStep(group), names)

    def call(self, call_id: int, call: WorkerCall) -> None:
        self._calls[call_id] = {}
        self._inbox.send(SubmittedCall(call_id, call), self._names)

    def poll(self) -> StepOutput | CallDone | None:
        news = self._take()
        assert not isinstance(news, Loading | EngineInfo), "loading news after it was done"
        return news

    def shutdown(self) -> None:
        can_end = len(self._infos) == len(self._names) and not self._troubles.has_any
        self._inbox.send(End(), self._names + self._nodes)
        if self._processes is not None:
            self._processes.close(END_GRACE_S if can_end else 0.0)
        if self._watch is not None:
            self._watch.close()
        self._inbox.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _endpoint(self) -> str:
        """Where ranks of this node find the engine."""
        if self._is_spread:
            return rank_endpoint(self._config.parallel.dist_init_addr or "", is_leader=True)
        return f"ipc://{self._folder}/ranks"

    def _start_ranks(self) -> None:
        """Once all nodes are there: this node's ranks here, the others' there."""
        method = f"file://{self._folder}/meeting"
        if self._is_spread:
            method = meeting_place(self._config.parallel.dist_init_addr or "")
        self._inbox.send(StartRanks(method), self._nodes)
        starts = rank_starts(self._config, endpoint=self._endpoint, init_method=method)
        self._processes = RankProcesses(starts, self._command)
        self._watch = Channel(open_socket(self._context, _WATCH, bind=False), ToRank)
        self._processes.watch(self._watch.send)

    @property
    def agent_channel(self) -> MultiProcessExecutor:
        return self

    def send_to_agent(self, rank: int, body: bytes) -> None:
        """Queue a command for the transfer agent of a rank."""
        self._inbox.send(AgentFrame(body), [self._names[rank]])

    def listen_to_agents(self, on_frame: Callable[[int, bytes], None]) -> None:
        """Call this with the rank and what its transfer agent says."""
        self._on_agent_frame = on_frame

    def _take(self) -> Loading | EngineInfo | StepOutput | CallDone | None:
        """The next news. Raises: what ends the engine."""
        self.receive()
        if not self._news:
            return None
        news = self._news.popleft()
        if isinstance(news, StepOutput):
            self.last_step = news.step_id
        return news

    def receive(self) -> None:
        """Take in what ranks and nodes have said. Raises: what ends the engine."""
        now = time.monotonic()
        for name, message in self._inbox.receive_all():
            self._signs.note(name, now)
            self._hear(name, message)
        self._check_silence(now)
        error = self._troubles.cause(now, settle_s=SETTLE_SPREAD_S if self._is_spread else SETTLE_LOST_S)
        if error is not None:
            raise error

    def _hear(self, name: str, message: FromRank) -> None:
        match message:
            case StepDone(output=output):
                self._join_results(name, output)
            case CallDone():
                self._gather(_number(name), message)
            case AgentFrame(body=body):
                if self._on_agent_frame is not None:
                    self._on_agent_frame(_number(name), body)
            case RankProgress(progress=progress):
                if name == self._names[0]:
                    self._news.append(progress)
            case RankLoaded(info=info):
                self._infos[_number(name)] = info
                if len(self._infos) == len(self._names):
                    self._news.append(common_info([self._infos[rank] for rank in range(len(self._names))]))
            case RankFailed():
                self._troubles.add_failed(name.replace("-", " "), message)
            case ProcessLost(rank=rank, what=what):
                self._troubles.add_lost(what, rank)
            case NodeLeaves():
                self._troubles.add_lost(f"{name.replace('-', ' ')} was told to end")
            case NodeHello():
                self._join(name, message)

    def _join_results(self, name: str, output: StepOutput) -> None:
        """A step is done when every data-parallel group's part of it is."""
        if len(self._groups) == 1:
            self._news.append(output)
            return
        self._results[next(index for index, names in enumerate(self._groups) if name in names)].append(output)
        if all(self._results):
            parts = [results.popleft() for results in self._results]
            self._news.append(StepOutput(parts[0].step_id, [], max(part.compute_s for part in parts), groups=parts))

    def _gather(self, rank: int, done: CallDone) -> None:
        """A call is done when all ranks have obeyed; it failed if one could not."""
        answers = self._calls[done.call_id]
        answers[rank] = done
        if len(answers) == len(self._names):
            del self._calls[done.call_id]
            in_order = [answers[rank] for rank in range(len(self._names))]
            self._news.append(next((answer for answer in in_order if answer.error_kind is not None), in_order[0]))

    def _join(self, name: str, hello: NodeHello) -> None:
        """A node that offers its ranks; it says so until it is told to start them."""
        if name not in self._nodes or name in self._offers:
            return
        unlike = difference(node_settings(self._config), hello.settings)
        if unlike is not None:
            reason = f"node {hello.node_rank} differs from node 0: {unlike}; give all nodes the same settings"
            self._inbox.send(Refused(reason), [name])
            raise ConfigError(reason)
        self._offers.add(name)
        logger.info("node %d is here", hello.node_rank)
        if len(self._offers) == len(self._nodes):
            self._start_ranks()

    def _check_silence(self, now: float) -> None:
        missing = [name for name in self._nodes if name not in self._offers]
        if missing and now - self._started_at > NODE_JOIN_S:
            raise ConfigError(
                f"{', '.join(missing)} did not come within {NODE_JOIN_S:g} s to {self._config.parallel.dist_init_addr};"
                " start `diptych serve` there with the same flags and its own --node-rank"
            )
        for name in self._signs.silent(self._nodes, now, NODE_SILENCE_S):
            self._troubles.add_lost(f"{name.replace('-', ' ')} says nothing for {NODE_SILENCE_S:g} s")
        limit_s = self._config.parallel.dist_timeout
        for name in self._signs.silent(self._names, now, limit_s):
            self._troubles.add_lost(f"{name.replace('-', ' ')} lives but says nothing for {limit_s:g} s", _number(name))


def common_info(infos: list[EngineInfo]) -> EngineInfo:
    """What an engine serves whose ranks say this, each of its own slice: as many pages as the poorest has."""
    return msgspec.structs.replace(
        infos[0],
        num_pages=min(info.num_pages for info in infos),
        max_model_len=min(info.max_model_len for info in infos),
        load_s=max(info.load_s for info in infos),
    )


def _number(name: str) -> int:
    """Of "rank-3"."""
    return int(name.rpartition("-")[2])
