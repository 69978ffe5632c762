"""A rank's transfer agent as its engine sees it from another process: commands and events as typed frames.

Owns the frames, which the executor's channel carries as opaque bytes. A write waits in the rank's process until the
rank itself has done the step whose pages it reads. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from diptych.errors import DiptychError, TransferError, error_of_kind
from diptych.transfer.agent import (
    AgentFailed,
    AgentReady,
    Notified,
    NotifyFailed,
    PeerAdded,
    PeerRefused,
    PeerRemoved,
    TransferEvent,
    WriteDone,
    WriteFailed,
)
from diptych.transfer.backend import MemoryKind, MemorySpace, Write
from diptych.transfer.plan import Descriptors


class OpenAgent(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Make an agent over the rank's pool. host: where its lifeline listens. rows_path: handoff rows to map, or none."""

    name: str
    host: str
    rows_path: str = ""
    rows_nbytes: int = 0


class AddPeer(msgspec.Struct, tag=True, frozen=True):
    """As Agent.add_peer."""

    key: str
    metadata: bytes


class RemovePeer(msgspec.Struct, tag=True, frozen=True):
    """As Agent.remove_peer."""

    peer: str


class PostWrite(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """As Agent.write, once step `after_step` is done here. src, dst, nbytes: int64, little-endian."""

    write_id: int
    after_step: int
    peer: str
    src: bytes
    dst: bytes
    nbytes: bytes
    notification: bytes
    source: tuple[MemoryKind, int]
    destination: tuple[MemoryKind, int]

    def write(self) -> Write:
        """What to write."""
        columns = (np.frombuffer(column, dtype="<i8") for column in (self.src, self.dst, self.nbytes))
        return Write(
            peer=self.peer,
            descriptors=Descriptors(*columns),
            notification=self.notification,
            source=MemorySpace(*self.source),
            destination=MemorySpace(*self.destination),
        )


class Expect(msgspec.Struct, tag=True, frozen=True):
    """As Agent.expect."""

    is_expecting: bool


class CloseAgent(msgspec.Struct, tag=True, frozen=True):
    """End the agent; it may be opened again."""


AgentCommand = OpenAgent | AddPeer | RemovePeer | PostWrite | Expect | CloseAgent


class Opened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The agent is there. kv_address, rows_address: in the rank's process; kv_device: as that counts."""

    name: str
    metadata: bytes
    kv_address: int
    kv_device: int
    rows_address: int
    lifeline: str


class Broke(msgspec.Struct, tag=True, frozen=True):
    """The agent could not start, or broke. kind: the name of a class of `diptych.errors`."""

    kind: str
    message: str


class Added(msgspec.Struct, tag=True, frozen=True):
    """As PeerAdded."""

    key: str
    peer: str
    lanes: list[str]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """As PeerRefused."""

    key: str
    kind: str
    message: str


class Removed(msgspec.Struct, tag=True, frozen=True):
    """As PeerRemoved."""

    peer: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """As WriteDone."""

    write_id: int
    peer: str
    nbytes: int
    num_descriptors: int
    seconds: float
    transport: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """As WriteFailed."""

    write_id: int
    peer: str
    kind: str
    message: str


class Heard(msgspec.Struct, tag=True, frozen=True):
    """As Notified."""

    peer: str
    message: bytes


AgentNews = Opened | Broke | Added | Refused | Removed | Done | Failed | Heard

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[AgentCommand] = msgspec.msgpack.Decoder(AgentCommand)
_NEWS: msgspec.msgpack.Decoder[AgentNews] = msgspec.msgpack.Decoder(AgentNews)


def decode_command(body: bytes) -> AgentCommand:
    """A command that the engine sent."""
    return _COMMANDS.decode(body)


def decode_news(body: bytes) -> AgentNews:
    """News of an agent."""
    return _NEWS.decode(body)


def encode(message: AgentCommand | AgentNews) -> bytes:
    """The bytes of either."""
    return _ENCODER.encode(message)


class RemoteAgent:
    """An `Agent` in a rank's process. Args: send: carries a command there. last_step: of those that are known to be
    done: what was computed in it may be written.
    """

    def __init__(self, send: Callable[[bytes], None], last_step: Callable[[], int]) -> None:
        self._send = send
        self._last_step = last_step

    def open(self, name: str, *, host: str, rows_path: str, rows_nbytes: int) -> None:
        """Begin: `Opened` or `Broke` follows."""
        self._tell(OpenAgent(name=name, host=host, rows_path=rows_path, rows_nbytes=rows_nbytes))

    def add_peer(self, key: str, metadata: bytes) -> None:
        self._tell(AddPeer(key, metadata))

    def remove_peer(self, peer: str) -> None:
        self._tell(RemovePeer(peer))

    def write(self, write_id: int, write: Write) -> None:
        descriptors = write.descriptors
        command = PostWrite(
            write_id=write_id,
            after_step=self._last_step(),
            peer=write.peer,
            src=descriptors.src.astype("<i8").tobytes(),
            dst=descriptors.dst.astype("<i8").tobytes(),
            nbytes=descriptors.nbytes.astype("<i8").tobytes(),
            notification=write.notification,
            source=(write.source.kind, write.source.device),
            destination=(write.destination.kind, write.destination.device),
        )
        self._tell(command)

    def expect(self, is_expecting: bool) -> None:
        self._tell(Expect(is_expecting))

    def close(self) -> None:
        """End it."""
        self._tell(CloseAgent())

    def _tell(self, command: AgentCommand) -> None:
        self._send(encode(command))


def news_of(event: TransferEvent) -> AgentNews | None:
    """What to tell the engine of an event; None: nothing, for what nobody asks for."""
    match event:
        case AgentFailed(error=error):
            return Broke(type(error).__name__, str(error))
        case PeerAdded(key=key, peer=peer, lanes=lanes):
            return Added(key, peer, sorted(lanes))
        case PeerRefused(key=key, error=error):
            return Refused(key, type(error).__name__, str(error))
        case PeerRemoved(peer=peer):
            return Removed(peer)
        case WriteDone():
            return Done(event.write_id, event.peer, event.nbytes, event.num_descriptors, event.seconds, event.transport)
        case WriteFailed(write_id=write_id, peer=peer, error=error):
            return Failed(write_id, peer, type(error).__name__, str(error))
        case Notified(peer=peer, message=message):
            return Heard(peer, message)
        case AgentReady() | NotifyFailed():
            return None


def event_of(news: AgentNews) -> TransferEvent:
    """The event that the engine acts on."""
    match news:
        case Opened(name=name, metadata=metadata):
            return AgentReady(name, metadata)
        case Broke(kind=kind, message=message):
            return AgentFailed(error_of_kind(kind, message))
        case Added(key=key, peer=peer, lanes=lanes):
            return PeerAdded(key, peer, frozenset(lanes))
        case Refused(key=key, kind=kind, message=message):
            return PeerRefused(key, _transfer_error(kind, message))
        case Removed(peer=peer):
            return PeerRemoved(peer)
        case Done():
            return WriteDone(news.write_id, news.peer, news.nbytes, news.num_descriptors, news.seconds, news.transport)
        case Failed(write_id=write_id, peer=peer, kind=kind, message=message):
            return WriteFailed(write_id, peer, _transfer_error(kind, message))
        case Heard(peer=peer, message=message):
            return Notified(peer, message)


def _transfer_error(kind: str, message: str) -> TransferError:
    error: DiptychError = error_of_kind(kind, message)
    return error if isinstance(error, TransferError) else TransferError(message)
