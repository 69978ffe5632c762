"""The thread of a worker's process that owns its transfer backend: commands in, events out.

One thread touches the backend, as NIXL requires, and it is neither the engine's nor the one that computes: a write
between host memories copies bytes while it is posted. Knows no rooms and no pages, only addresses. Never imports torch.

    any thread --command--> queue --> agent's thread --event--> on_event(event), called on the agent's thread
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from diptych.errors import DiptychError, PeerLost, TransferError
from diptych.transfer.agent import (
    AgentFailed,
    AgentReady,
    NotifyFailed,
    PeerRefused,
    PeerRemoved,
    StepwiseAgent,
    TransferEvent,
    WriteFailed,
)
from diptych.transfer.backend import MemoryRegion, TransferBackend, Write

logger = logging.getLogger(__name__)

# How long the thread sleeps before it polls again, unless a command comes: while writes are unfinished and for a while
# after any command (a first message to a peer takes several polls of both sides), while somebody waits, and else, for
# what nobody waits for: stray notifications, keepalive, peers that connect.
BUSY_POLL_S = 0.0001
BUSY_FOR_S = 0.02
EXPECTING_POLL_S = 0.0005
IDLE_POLL_S = 0.05
MAX_WAITING_PEERS = 256


class Probe(Protocol):
    """Tries metadata before they reach the backend; `diptych.transfer.metadata_probe.MetadataProbe`."""

    def check(self, metadata: bytes) -> frozenset[str]:
        """UCX's transports to the peer, if they are known. Raises PeerIncompatible for what must not reach the backend;
        may take a second.
        """
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


@dataclass(frozen=True, slots=True)
class _AddPeer:
    key: str
    metadata: bytes
    lanes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Refuse:
    key: str
    error: TransferError


@dataclass(frozen=True, slots=True)
class _RemovePeer:
    peer: str


@dataclass(frozen=True, slots=True, eq=False)
class _Post:
    write_id: int
    write: Write


@dataclass(frozen=True, slots=True)
class _Notify:
    peer: str
    message: bytes


@dataclass(frozen=True, slots=True)
class _Expect:
    is_expecting: bool


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = _AddPeer | _Refuse | _RemovePeer | _Post | _Notify | _Expect | _Close


class TransferAgent:
    """A transfer backend on a thread of its own. Methods return at once and may be called from any thread.

    make_backend: called on the thread. regions: registered before the first event. on_event: called on the thread,
    must be quick and not raise; the order of events is the order in which things happened. probe: what metadata must
    pass first, on a thread of its own, since that may take a second; the agent closes it.
    """

    def __init__(
        self,
        make_backend: Callable[[], TransferBackend],
        regions: Sequence[MemoryRegion],
        *,
        on_event: Callable[[TransferEvent], None],
        probe: Probe | None = None,
    ) -> None:
        self._make_backend = make_backend
        self._regions = tuple(regions)
        self._on_event = on_event
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="diptych-transfer", daemon=True)
        self._probing = None if probe is None else _Probing(probe, self._commands)

    def start(self) -> None:
        """Begin; `AgentReady` or `AgentFailed` follows."""
        self._thread.start()
        if self._probing is not None:
            self._probing.start()

    def add_peer(self, key: str, metadata: bytes) -> None:
        """Meet a peer; `PeerAdded` or `PeerRefused` with this key follows."""
        command = _AddPeer(key, metadata)
        if self._probing is None:
            self._commands.put(command)
        else:
            self._probing.put(command)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; `WriteFailed` for each of its unfinished writes, then `PeerRemoved` follow."""
        self._commands.put(_RemovePeer(peer))

    def write(self, write_id: int, write: Write) -> None:
        """Copy bytes to a peer and notify it; `WriteDone` or `WriteFailed` with this id follows, exactly one."""
        self._commands.put(_Post(write_id, write))

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification alone; only a failure is reported."""
        self._commands.put(_Notify(peer, message))

    def expect(self, is_expecting: bool) -> None:
        """Whether somebody waits for a notification: polls every 0.5 ms if so, else 20 times a second."""
        self._commands.put(_Expect(is_expecting))

    def close(self) -> None:
        """End the thread; unfinished writes are reported as failed first. Waits for a write that is being posted."""
        if self._probing is not None:
            self._probing.close()
        self._commands.put(_Close())
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        """The agent's thread."""
        try:
            backend = self._make_backend()
        except DiptychError as error:
            self._on_event(AgentFailed(error))
            return
        except Exception as error:
            self._on_event(AgentFailed(_unforeseen(error)))
            return
        loop = _Loop(backend, self._commands, self._on_event)
        try:
            backend.register(self._regions)
            self._on_event(AgentReady(backend.name, backend.metadata()))
            loop.run()
            loop.end(PeerLost("this engine is shutting down"))
        except Exception as error:
            logger.exception("the transfer agent %s stops", backend.name)
            failure = error if isinstance(error, DiptychError) else _unforeseen(error)
            loop.end(TransferError(f"the transfer agent broke: {failure}"))
            self._on_event(AgentFailed(failure))
        finally:
            backend.close()


class _Probing:
    """The thread on which metadata are probed before they become a command of the agent."""

    def __init__(self, probe: Probe, commands: queue.SimpleQueue[_Command]) -> None:
        self._probe = probe
        self._commands = commands
        self._waiting: queue.Queue[_AddPeer | None] = queue.Queue(MAX_WAITING_PEERS)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="diptych-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, command: _AddPeer) -> None:
        try:
            self._waiting.put_nowait(command)
        except queue.Full:
            self._commands.put(_Refuse(command.key, TransferError("too many new peers at once; try again later")))

    def close(self) -> None:
        """Refuse what still waits, and end after the one that is being probed."""
        self._is_closing = True
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (command := self._waiting.get()) is not None:
            try:
                if self._is_closing:
                    raise PeerLost("this engine is shutting down")
                lanes = self._probe.check(command.metadata)
                self._commands.put(replace(command, lanes=lanes))
            except TransferError as error:
                self._commands.put(_Refuse(command.key, error))
            except Exception as error:
                self._commands.put(_Refuse(command.key, _unforeseen(error)))
        self._probe.close()


class _Loop:
    """What the agent's thread does between its start and its end."""

    def __init__(
        self,
        backend: TransferBackend,
        commands: queue.SimpleQueue[_Command],
        on_event: Callable[[TransferEvent], None],
    ) -> None:
        self._agent = StepwiseAgent(backend, on_event=on_event)
        self._commands = commands
        self._on_event = on_event
        self._busy_until = 0.0
        self._is_open = True

    def run(self) -> None:
        """Until told to close: sleep until a command or the next poll, act, poll."""
        while self._is_open:
            with contextlib.suppress(queue.Empty):
                self._act(self._commands.get(timeout=self._poll_s()))
            self._agent.poll()

    def end(self, error: TransferError) -> None:
        """Report what will not be done: posted writes, and commands still queued."""
        self._agent.give_up(error)
        while not self._commands.empty():
            match self._commands.get():
                case _Post(write_id=write_id, write=write):
                    self._on_event(WriteFailed(write_id, write.peer, error))
                case _AddPeer(key=key) | _Refuse(key=key):
                    self._on_event(PeerRefused(key, error))
                case _Notify(peer=peer, message=message):
                    self._on_event(NotifyFailed(peer, message, error))
                case _RemovePeer(peer=peer):
                    self._on_event(PeerRemoved(peer))

    def _poll_s(self) -> float:
        if self._agent.num_unfinished or time.monotonic() < self._busy_until:
            return BUSY_POLL_S
        return EXPECTING_POLL_S if self._agent.is_expecting else IDLE_POLL_S

    def _act(self, command: _Command) -> None:
        self._busy_until = time.monotonic() + BUSY_FOR_S
        match command:
            case _Post(write_id=write_id, write=write):
                self._agent.write(write_id, write)
            case _AddPeer(key=key, metadata=metadata, lanes=lanes):
                self._agent.add_peer(key, metadata, lanes)
            case _Refuse(key=key, error=error):
                self._on_event(PeerRefused(key, error))
            case _RemovePeer(peer=peer):
                self._agent.remove_peer(peer)
            case _Notify(peer=peer, message=message):
                self._agent.notify(peer, message)
            case _Expect(is_expecting=is_expecting):
                self._agent.expect(is_expecting)
            case _Close():
                self._is_open = False


def _unforeseen(error: Exception) -> TransferError:
    return TransferError(f"{type(error).__name__}: {error}")
