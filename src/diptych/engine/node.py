"""A node that is not the first: runs its ranks for the engine on node 0, and ends with it.

`diptych serve` on such a node serves no HTTP. The node offers itself until node 0 says that all are there; from then on
either end's silence ends both. Main thread; never imports torch.
"""

from __future__ import annotations

import logging
import queue
import signal
import time

import zmq

from diptych.config import EngineConfig
from diptych.core.channel import Channel
from diptych.core.ranks import (
    Beat,
    End,
    FromRank,
    NodeHello,
    NodeLeaves,
    ProcessLost,
    Refused,
    StartRanks,
    ToNode,
)
from diptych.engine.multi_process import END_GRACE_S, NODE_JOIN_S
from diptych.engine.rank_process import RANK_COMMAND, RankProcesses, rank_starts
from diptych.engine.rank_sockets import Connection, open_dealer
from diptych.engine.spread import node_settings, rank_endpoint
from diptych.errors import ConfigError, RankLost

logger = logging.getLogger(__name__)

BEAT_INTERVAL_MS = 500


def run_node(config: EngineConfig, *, command: tuple[str, ...] = RANK_COMMAND) -> int:
    """Run this node's ranks until node 0 ends. Returns the exit status: 0 after an orderly end.

    Args: config: resolved, with a node_rank above 0. command: as MultiProcessExecutor's.
    Raises: ConfigError if node 0 does not come or refuses; RankLost if it or a rank of this node is lost.
    """
    node = Node(config, command)
    signal.signal(signal.SIGTERM, lambda *_: node.leave())
    signal.signal(signal.SIGINT, lambda *_: node.leave())
    try:
        return node.run()
    finally:
        node.close()


class Node:
    """One run of a node, on the main thread."""

    def __init__(self, config: EngineConfig, command: tuple[str, ...]) -> None:
        self._config = config
        self._command = command
        self._address = config.parallel.dist_init_addr or ""
        self._endpoint = rank_endpoint(self._address, is_leader=False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        name = f"node-{config.parallel.node_rank}"
        socket = open_dealer(self._context, name=name, cluster_key=config.transfer.cluster_key)
        self._connection = Connection(socket)
        socket.connect(self._endpoint)
        self._channel: Channel[FromRank, ToNode] = Channel(socket, ToNode)
        self._losses: queue.SimpleQueue[ProcessLost] = queue.SimpleQueue()
        self._processes: RankProcesses | None = None
        self._leaves = self._has_lost = False
        self._grace_s = 0.0

    def leave(self) -> None:
        """End soon; for a signal handler."""
        self._leaves = True

    def run(self) -> int:
        """Offer, serve, end."""
        logger.info("node %d looks for node 0 at %s", self._config.parallel.node_rank, self._address)
        deadline = time.monotonic() + NODE_JOIN_S
        while not self._leaves:
            for message in self._channel.receive_all():
                match message:
                    case StartRanks(init_method=init_method):
                        self._start(init_method)
                    case Refused(reason=reason):
                        raise ConfigError(reason)
                    case End():
                        logger.info("node 0 has ended; this node ends, too")
                        self._grace_s = 0.0 if self._has_lost else END_GRACE_S
                        return 0
            if self._processes is None:
                self._offer(deadline)
            else:
                self._watch()
            self._channel.socket.poll(BEAT_INTERVAL_MS)
        self._channel.send(NodeLeaves())
        return 0

    def close(self) -> None:
        """End the ranks and the connection."""
        if self._processes is not None:
            self._processes.close(self._grace_s)
        self._connection.close()
        self._channel.close()
        self._context.term()

    def _offer(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"node 0 did not answer at {self._address} within {NODE_JOIN_S:g} s; is --dist-init-addr right, the "
                "cluster key the same, and no other node called the same?"
            )
        node_rank = self._config.parallel.node_rank or 0
        self._channel.send(NodeHello(node_rank, node_settings(self._config)))

    def _start(self, init_method: str) -> None:
        self._connection.has_ended()  # what was before does not matter
        starts = rank_starts(self._config, endpoint=self._endpoint, init_method=init_method)
        self._processes = RankProcesses(starts, self._command)
        self._processes.watch(self._losses.put)
        logger.info("running ranks %s", ", ".join(str(start.rank) for start in starts))

    def _watch(self) -> None:
        """Raises: RankLost if node 0 is lost. Of a rank that is lost node 0 is told, which then ends all."""
        self._channel.send(Beat())
        while not self._losses.empty():
            loss, self._has_lost = self._losses.get(), True
            logger.error("%s", loss.what)
            self._channel.send(loss)
        if self._connection.has_ended():
            raise RankLost(f"node 0 at {self._address} is lost; this node ends, too")
