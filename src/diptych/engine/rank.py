"""Entry point of one rank's process: `python -m diptych.engine.rank`, told its `RankStart` on standard input.

The main thread talks to the engine and gives signs of life; the worker's thread (`InProcessExecutor`) computes. It ends
when the engine says so, when its work fails, and with the process that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from diptych.core.batch import StepOutput
from diptych.core.calls import CallDone, SubmittedCall
from diptych.core.channel import Channel
from diptych.core.messages import EngineInfo, Loading
from diptych.core.ranks import (
    AgentFrame,
    Beat,
    End,
    FromRank,
    RankFailed,
    RankLoaded,
    RankProgress,
    RunStep,
    StepDone,
    ToRank,
)
from diptych.engine.executor import Executor, InProcessExecutor
from diptych.engine.rank_agent import RankAgent
from diptych.engine.rank_process import RankStart
from diptych.engine.rank_sockets import open_dealer
from diptych.errors import ConfigError, DiptychError, InvariantError, RankLost
from diptych.lifetime import die_with_parent
from diptych.log import setup_logging
from diptych.resolve import data_parallel_ranks, mesh_sizes, placement

if TYPE_CHECKING:
    from diptych.parallel.world import World

logger = logging.getLogger(__name__)

BEAT_INTERVAL_MS = 1000
# As in an engine's own process.
SWITCH_INTERVAL_S = 0.0002
# For the last words to reach the engine.
LINGER_MS = 1000


def main(make_executor: Callable[[RankStart], Executor] | None = None) -> None:
    """Run a rank until its engine ends it. Does not return: a thread that is stuck must not keep the process.

    Args: make_executor: what computes; default: a worker in the ranks' world.
    """
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=RankStart)
    arm = die_with_parent(start.parent_pid)
    if arm is not None:
        arm()
    level = start.config.server.log_level
    setup_logging("worker", level if start.rank == 0 or level == "debug" else "warning", start.rank)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = RankLoop(start, (make_executor or make_worker)(start)).run()
    sys.stderr.flush()
    os._exit(code)


class RankLoop:
    """Passes what the engine says to the executor, and what that finds to the engine."""

    def __init__(self, start: RankStart, executor: Executor) -> None:
        parallel = start.config.parallel
        is_spread = placement(parallel).nnodes > 1
        self._executor = executor
        self._agent = RankAgent()
        last_stage = range(parallel.world_size - parallel.tp_size, parallel.world_size)
        # Whoever comes first in its group and in the last stage.
        self._reports = start.rank in [
            min(rank for rank in ranks if rank in last_stage) for ranks in data_parallel_ranks(parallel)
        ]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        key = start.config.transfer.cluster_key if is_spread else None
        socket = open_dealer(self._context, name=f"rank-{start.rank}", cluster_key=key)
        socket.connect(start.endpoint)
        self._channel: Channel[FromRank, ToRank] = Channel(socket, ToRank)
        self._next_beat = 0.0
        self._is_loaded = False

    def run(self) -> int:
        """Returns the exit status: 1 after an error, of which the engine has been told."""
        try:
            self._executor.start()
            self._serve()
            self._agent.close()
            self._executor.shutdown()
            code = 0
        except Exception as error:
            fatal = error if isinstance(error, DiptychError) else InvariantError(f"{type(error).__name__}: {error}")
            if not isinstance(fatal, ConfigError | RankLost):
                logger.error("this rank ends: %s", fatal, exc_info=True)
            self._channel.send(RankFailed(type(fatal).__name__, str(fatal)))
            code = 1
        self._channel.socket.close(linger=LINGER_MS)
        self._context.term()
        return code

    def _serve(self) -> None:
        """Until the engine says that it ends. Raises: what the worker failed with."""
        poller = zmq.Poller()
        poller.register(self._channel.socket, zmq.POLLIN)
        poller.register(self._executor.wake_fd, zmq.POLLIN)
        poller.register(self._agent.wake_fd, zmq.POLLIN)
        while True:
            for message in self._channel.receive_all():
                match message:
                    case RunStep(batch=batch):
                        self._executor.submit(batch)
                    case SubmittedCall(call_id=call_id, call=call):
                        self._executor.call(call_id, call)
                    case AgentFrame(body=body):
                        self._agent.obey(body)
                    case End():
                        return
            self._tell_news()
            for body in self._agent.news():
                self._channel.send(AgentFrame(body))
            if time.monotonic() >= self._next_beat:
                self._channel.send(Beat())
                self._next_beat = time.monotonic() + BEAT_INTERVAL_MS / 1000
            poller.poll(BEAT_INTERVAL_MS)

    def _tell_news(self) -> None:
        while True:
            match self._executor.poll() if self._is_loaded else self._executor.poll_loading():
                case Loading() as progress:
                    self._channel.send(RankProgress(progress))
                case EngineInfo() as info:
                    self._is_loaded = True
                    self._agent.loaded(info)
                    self._channel.send(RankLoaded(info))
                case StepOutput() as output:
                    self._agent.done(output.step_id)
                    if self._reports:
                        self._channel.send(StepDone(output))
                case CallDone() as done:
                    self._channel.send(done)
                case None:
                    return


def make_worker(start: RankStart) -> InProcessExecutor:
    """A worker in a world with the other ranks."""
    return InProcessExecutor(start.config, open_world=partial(open_world, start))


def open_world(start: RankStart) -> World:
    """Meet the other ranks; on the worker's thread. Raises: RankLost, ConfigError."""
    # Imported here: the main thread has signs of life to give while torch is imported.
    import torch

    from diptych.parallel.mesh import Mesh
    from diptych.parallel.world import World, WorldOptions
    from diptych.worker.worker import resolve_device

    parallel = start.config.parallel
    where = placement(parallel)
    device = resolve_device(start.config.model.device)
    uses_nccl = device.type == "cuda"
    if uses_nccl:
        num_devices = torch.cuda.device_count()
        device = torch.device("cuda", where.local_rank(start.rank) % num_devices)
        torch.cuda.set_device(device)
        if num_devices < where.local_size:
            uses_nccl = False
            logger.warning("%d ranks share %d GPUs: collectives go through the CPU", where.local_size, num_devices)
    options = WorldOptions(init_method=start.init_method, uses_nccl=uses_nccl, timeout_s=parallel.dist_timeout)
    return World(Mesh(sizes=mesh_sizes(parallel), rank=start.rank), where, device=device, options=options)


if __name__ == "__main__":
    main()
