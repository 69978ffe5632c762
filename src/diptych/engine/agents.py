"""The transfer agents of an engine's ranks: a thread of this process for one rank, one in each rank's for several.

Owns their start, the memory of the handoff rows, and the queue of their events. Engine thread, except that agents'
threads queue. Never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.core.messages import EngineInfo
from diptych.engine.rank_agent import memory_space, nixl_backend
from diptych.engine.waking_queue import WakingQueue
from diptych.errors import ConfigError
from diptych.transfer.agent import AgentFailed, AgentReady, TransferEvent
from diptych.transfer.backend import MemoryKind, MemoryRegion, MemorySpace
from diptych.transfer.metadata_probe import MetadataProbe
from diptych.transfer.ports import Agent, RankSite
from diptych.transfer.ranks import HANDOFF_RANK
from diptych.transfer.remote_agent import Opened, RemoteAgent, decode_news, event_of
from diptych.transfer.shared_rows import SharedRows
from diptych.worker.transfer_agent import TransferAgent

AGENT_START_S = 60.0
_WAIT_S = 0.02


class AgentChannel(Protocol):
    """How an engine reaches the transfer agents in its ranks' processes."""

    @property
    def last_step(self) -> int:
        """Of those whose results have been taken."""
        ...

    def send_to_agent(self, rank: int, body: bytes) -> None:
        """Queue a command."""
        ...

    def listen_to_agents(self, on_frame: Callable[[int, bytes], None]) -> None:
        """Call this with the rank and its news whenever some arrive."""
        ...

    def receive(self) -> None:
        """Take in what has arrived. Raises what ends the engine."""
        ...


class RankAgents(Protocol):
    """The agents of all ranks, once they are ready. rows: handoff rows, which the agent of HANDOFF_RANK has at
    `rows_address`.
    """

    agents: Sequence[Agent]
    ranks: Sequence[RankSite]
    lifelines: Sequence[str]
    rows: NDArray[np.uint8]
    rows_address: int

    @property
    def wake_fd(self) -> int:
        """Readable when `events` may have some."""
        ...

    def events(self) -> list[tuple[int, TransferEvent]]:
        """What they have said since the last call, each with its rank."""
        ...

    def close(self) -> None:
        """End them."""
        ...


def start_agents(
    name: str, info: EngineInfo, *, rows_nbytes: int, host: str, channel: AgentChannel | None
) -> RankAgents:
    """Start an agent over every rank's pool.

    Args: name: unique to this start of the engine. host: where the ranks' lifelines listen. channel: None where the
    only rank is a thread of this process. Raises ConfigError if NIXL cannot be had, or the agents do not start in time.
    """
    if channel is None:
        return LocalAgents(name, info, rows_nbytes=rows_nbytes)
    return RemoteAgents(name, info, channel, rows_nbytes=rows_nbytes, host=host)


class LocalAgents:
    """One rank: its agent is a thread of this process."""

    def __init__(self, name: str, info: EngineInfo, *, rows_nbytes: int) -> None:
        self._events: WakingQueue[tuple[int, TransferEvent]] = WakingQueue()
        self.rows = np.zeros(rows_nbytes, dtype=np.uint8)
        self.rows_address = self.rows.ctypes.data
        space = memory_space(info.device)
        regions = [
            MemoryRegion(info.kv_address, info.num_pages * info.page_nbytes, space),
            MemoryRegion(self.rows_address, rows_nbytes),
        ]
        self._agent = TransferAgent(
            lambda: nixl_backend(name, space.kind),
            regions,
            on_event=lambda event: self._events.put((0, event)),
            probe=MetadataProbe(),
        )
        self._agent.start()
        self.agents: Sequence[Agent] = [self._agent]
        self.lifelines: Sequence[str] = []
        try:
            (ready,) = _wait_ready(self._events, 1).values()
        except BaseException:
            self.close()
            raise
        self.ranks: Sequence[RankSite] = [
            RankSite(agent_name=ready.name, agent_metadata=ready.metadata, kv_base=info.kv_address, kv_space=space)
        ]

    @property
    def wake_fd(self) -> int:
        return self._events.wake_fd

    def events(self) -> list[tuple[int, TransferEvent]]:
        return self._events.take_all()

    def close(self) -> None:
        self._agent.close()
        self._events.close()


class RemoteAgents:
    """Several ranks: an agent in the process of each."""

    def __init__(self, name: str, info: EngineInfo, channel: AgentChannel, *, rows_nbytes: int, host: str) -> None:
        self._events: WakingQueue[tuple[int, TransferEvent]] = WakingQueue()
        self._opened: dict[int, Opened] = {}
        self._shared = SharedRows(rows_nbytes)
        self.rows = self._shared.rows
        self._channel = channel
        channel.listen_to_agents(self._hear)
        remotes = [_remote_agent(channel, rank) for rank in range(len(info.pools))]
        self._remotes = remotes
        self.agents: Sequence[Agent] = remotes
        for rank, remote in enumerate(remotes):
            has_rows = rank == HANDOFF_RANK
            remote.open(
                f"{name}-{rank}",
                host=host,
                rows_path=self._shared.path if has_rows else "",
                rows_nbytes=rows_nbytes if has_rows else 0,
            )
        try:
            _wait_ready(self._events, len(remotes), channel)
        except BaseException:
            self.close()
            raise
        opened = [self._opened[rank] for rank in range(len(remotes))]
        kind = memory_space(info.device).kind
        self.rows_address = opened[HANDOFF_RANK].rows_address
        self.lifelines: Sequence[str] = [each.lifeline for each in opened]
        self.ranks: Sequence[RankSite] = [_site_of(each, kind) for each in opened]

    @property
    def wake_fd(self) -> int:
        return self._events.wake_fd

    def events(self) -> list[tuple[int, TransferEvent]]:
        return self._events.take_all()

    def close(self) -> None:
        self._channel.listen_to_agents(_ignore)
        for remote in self._remotes:
            remote.close()
        self._shared.close()
        self._events.close()

    def _hear(self, rank: int, body: bytes) -> None:
        news = decode_news(body)
        if isinstance(news, Opened):
            self._opened[rank] = news
        self._events.put((rank, event_of(news)))


def _ignore(rank: int, body: bytes) -> None:
    """News of agents that are told to end."""


def _remote_agent(channel: AgentChannel, rank: int) -> RemoteAgent:
    return RemoteAgent(lambda body: channel.send_to_agent(rank, body), lambda: channel.last_step)


def _site_of(opened: Opened, kind: MemoryKind) -> RankSite:
    space = MemorySpace(kind, opened.kv_device)
    return RankSite(agent_name=opened.name, agent_metadata=opened.metadata, kv_base=opened.kv_address, kv_space=space)


def _wait_ready(
    events: WakingQueue[tuple[int, TransferEvent]], num_ranks: int, channel: AgentChannel | None = None
) -> dict[int, AgentReady]:
    """The first event of every rank. Args: channel: whence they come, if not from threads of this process.

    Raises ConfigError, and what an agent failed with.
    """
    ready: dict[int, AgentReady] = {}
    deadline = time.monotonic() + AGENT_START_S
    while len(ready) < num_ranks:
        time.sleep(_WAIT_S)
        if channel is not None:
            channel.receive()
        for rank, event in events.take_all():
            if isinstance(event, AgentFailed):
                raise event.error
            assert isinstance(event, AgentReady), "an agent's first event says whether it could start"
            ready[rank] = event
        if time.monotonic() > deadline:
            raise ConfigError(f"{len(ready)} of {num_ranks} transfer agents started within {AGENT_START_S:g} s")
    return ready
