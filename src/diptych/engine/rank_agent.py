"""The transfer agent in a rank's process: obeys the engine's frames, and answers with what the agent's thread says.

Holds a write back until the worker of this rank has done the step whose pages it reads: other ranks may be ahead of it.
Main thread of the rank, except that the agent's thread queues its events. Never imports torch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from diptych.core.messages import EngineInfo
from diptych.engine.waking_queue import WakingQueue
from diptych.errors import ConfigError
from diptych.transfer.agent import AgentReady, TransferEvent
from diptych.transfer.backend import HOST, MemoryKind, MemoryRegion, MemorySpace, TransferBackend
from diptych.transfer.metadata_probe import MetadataProbe
from diptych.transfer.nixl import NixlBackend
from diptych.transfer.remote_agent import (
    AddPeer,
    AgentCommand,
    CloseAgent,
    Expect,
    OpenAgent,
    Opened,
    PostWrite,
    RemovePeer,
    decode_command,
    encode,
    news_of,
)
from diptych.transfer.shared_rows import open_rows
from diptych.worker.transfer_agent import Probe, TransferAgent

MakeBackend = Callable[[str, MemoryKind], TransferBackend]


def nixl_backend(name: str, kind: MemoryKind) -> TransferBackend:
    """What moves bytes between real processes."""
    return NixlBackend(name, kind=kind)


class RankAgent:
    """At most one agent at a time. wake_fd: readable when `news` may have some.

    Args: make_backend, make_probe: what moves bytes, and what metadata must pass before they reach it.
    """

    def __init__(
        self,
        make_backend: MakeBackend = nixl_backend,
        make_probe: Callable[[], Probe | None] = MetadataProbe,
    ) -> None:
        self._make_backend = make_backend
        self._make_probe = make_probe
        self._events: WakingQueue[TransferEvent] = WakingQueue()
        self.wake_fd = self._events.wake_fd
        self._agent: TransferAgent | None = None
        self._lifeline: socket.socket | None = None
        self._rows: NDArray[np.uint8] | None = None
        self._info: EngineInfo | None = None
        self._last_step = -1
        self._early: list[PostWrite] = []

    def loaded(self, info: EngineInfo) -> None:
        """This rank has its pool."""
        self._info = info

    def done(self, step_id: int) -> None:
        """This rank has done a step: writes that waited for it go on."""
        self._last_step = step_id
        if self._early:
            early, self._early = self._early, []
            for write in early:
                self._act(write)

    def obey(self, body: bytes) -> None:
        """Do what the engine says. Raises ConfigError if rows or a lifeline cannot be had."""
        self._act(decode_command(body))

    def news(self) -> list[bytes]:
        """What to tell the engine."""
        told = []
        for event in self._events.take_all():
            news = self._opened(event) if isinstance(event, AgentReady) else news_of(event)
            if news is not None:
                told.append(encode(news))
        return told

    def close(self) -> None:
        """End the agent; the last to go is what tells peers that we are alive."""
        self._early.clear()
        if self._agent is not None:
            self._agent.close()
            self._agent = None
            self.news()  # of what it gave up nobody waits to hear
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def _act(self, command: AgentCommand) -> None:
        if isinstance(command, OpenAgent):
            self._open(command)
            return
        agent = self._agent
        assert agent is not None, "the engine opens an agent before it uses it"
        match command:
            case AddPeer(key=key, metadata=metadata):
                agent.add_peer(key, metadata)
            case RemovePeer(peer=peer):
                agent.remove_peer(peer)
            case PostWrite(after_step=after_step) if after_step > self._last_step:
                self._early.append(command)
            case PostWrite(write_id=write_id):
                agent.write(write_id, command.write())
            case Expect(is_expecting=is_expecting):
                agent.expect(is_expecting)
            case CloseAgent():
                self.close()

    def _open(self, command: OpenAgent) -> None:
        info = self._info
        assert info is not None, "ranks are loaded before the engine meets its peers"
        space = memory_space(info.device)
        regions = [MemoryRegion(info.kv_address, info.num_pages * info.page_nbytes, space)]
        if command.rows_path:
            self._rows = open_rows(command.rows_path, command.rows_nbytes)
            regions.append(MemoryRegion(self._rows.ctypes.data, self._rows.nbytes))
        self._lifeline = _listen(command.host)
        agent = TransferAgent(
            lambda: self._make_backend(command.name, space.kind),
            regions,
            on_event=self._events.put,
            probe=self._make_probe(),
        )
        self._agent = agent
        agent.start()

    def _opened(self, ready: AgentReady) -> Opened:
        assert self._info is not None and self._lifeline is not None, "the agent was opened with both"
        host, port = self._lifeline.getsockname()[:2]
        return Opened(
            name=ready.name,
            metadata=ready.metadata,
            kv_address=self._info.kv_address,
            kv_device=memory_space(self._info.device).device,
            rows_address=0 if self._rows is None else self._rows.ctypes.data,
            lifeline=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        )


def memory_space(device: str) -> MemorySpace:
    """Where the pool of a worker on `device` ("cpu", "cuda:1") is."""
    kind, _, index = device.partition(":")
    return MemorySpace(MemoryKind.VRAM, int(index or 0)) if kind == "cuda" else HOST


def _listen(host: str) -> socket.socket:
    """A port on which nobody answers: it is refused once this process is dead. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"a rank cannot listen on {host}: {error}; set peer_host to an address of this node"
        ) from error
    return listener
