"""A transfer backend as the engine sees it: commands in, events out, in the order in which things happened.

`StepwiseAgent` is the part without a thread, which the simulation uses as it is; `worker/transfer_agent.py` puts it on
a thread of the worker's process. Knows no rooms and no pages. Never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from diptych.errors import DiptychError, TransferError
from diptych.transfer.backend import TransferBackend, Write
from diptych.transfer.plan import Descriptors


@dataclass(frozen=True, slots=True)
class AgentReady:
    """The first event. metadata: for peers."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class AgentFailed:
    """The last event: the backend could not start, or broke. Every unfinished write has been reported as failed."""

    error: DiptychError


@dataclass(frozen=True, slots=True)
class PeerAdded:
    """key: the caller's own, from `add_peer`. peer: the agent's name, for `write`. lanes: UCX's transports to it, if
    they are known.
    """

    key: str
    peer: str
    lanes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The metadata given under `key` cannot be used."""

    key: str
    error: TransferError


@dataclass(frozen=True, slots=True)
class PeerRemoved:
    """No write to the peer is unfinished any more; all of them have been reported."""

    peer: str


@dataclass(frozen=True, slots=True)
class WriteDone:
    """Every byte and the notification were sent. seconds: from posting to the end. transport: what carries the peer."""

    write_id: int
    peer: str
    nbytes: int
    num_descriptors: int
    seconds: float
    transport: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write may have landed in part; `PeerLost` if it is the peer that is gone."""

    write_id: int
    peer: str
    error: TransferError


@dataclass(frozen=True, slots=True)
class Notified:
    """A peer's notification arrived, and the bytes it was sent with."""

    peer: str
    message: bytes


@dataclass(frozen=True, slots=True)
class NotifyFailed:
    """A bare notification could not be sent."""

    peer: str
    message: bytes
    error: TransferError


TransferEvent = (
    AgentReady | AgentFailed | PeerAdded | PeerRefused | PeerRemoved | WriteDone | WriteFailed | Notified | NotifyFailed
)


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """A write that has not ended."""

    write_id: int
    peer: str
    descriptors: Descriptors
    started_s: float


class StepwiseAgent:
    """Commands act at once, events come from within calls: `poll` is to be called again and again. One thread only.

    on_event: must not raise. clock: seconds, for how long writes took.
    """

    def __init__(
        self,
        backend: TransferBackend,
        *,
        on_event: Callable[[TransferEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._on_event = on_event
        self._clock = clock
        self._posted: dict[int, _Posted] = {}
        self.is_expecting = False

    @property
    def num_unfinished(self) -> int:
        """Writes that have not ended."""
        return len(self._posted)

    def add_peer(self, key: str, metadata: bytes, lanes: frozenset[str] = frozenset()) -> None:
        """Meet a peer: `PeerAdded`, which passes `lanes` on, or `PeerRefused`."""
        try:
            self._on_event(PeerAdded(key, self._backend.add_peer(metadata), lanes))
        except TransferError as error:
            self._on_event(PeerRefused(key, error))

    def remove_peer(self, peer: str) -> None:
        """Forget a peer: `WriteFailed` for each of its unfinished writes, then `PeerRemoved`."""
        self._backend.remove_peer(peer)
        self.poll()
        self._on_event(PeerRemoved(peer))

    def write(self, write_id: int, write: Write) -> None:
        """Post a write: `WriteDone` or `WriteFailed` comes from a later poll."""
        posted = _Posted(write_id, write.peer, write.descriptors, self._clock())
        self._posted[self._backend.write(write)] = posted

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification alone: `NotifyFailed`, or nothing."""
        try:
            self._backend.notify(peer, message)
        except TransferError as error:
            self._on_event(NotifyFailed(peer, message, error))

    def expect(self, is_expecting: bool) -> None:
        """Note whether somebody waits for notifications."""
        self.is_expecting = is_expecting

    def poll(self) -> None:
        """Move everything on and report what happened."""
        for result in self._backend.poll():
            posted = self._posted.pop(result.handle, None)
            if posted is None:
                continue  # given up, and reported then
            if result.error is None:
                self._on_event(self._done(posted))
            else:
                self._on_event(WriteFailed(posted.write_id, posted.peer, result.error))
        for peer, message in self._backend.notifications():
            self._on_event(Notified(peer, message))

    def give_up(self, error: TransferError) -> None:
        """Report every unfinished write as failed."""
        for posted in self._posted.values():
            self._on_event(WriteFailed(posted.write_id, posted.peer, error))
        self._posted.clear()

    def _done(self, posted: _Posted) -> WriteDone:
        return WriteDone(
            posted.write_id,
            posted.peer,
            posted.descriptors.total_nbytes,
            len(posted.descriptors),
            self._clock() - posted.started_s,
            self._backend.transport(posted.peer),
        )
