"""What has arrived of one room, from notifications in any order. Pure; knows no pages and no sockets.

A room is complete when of every stream, from a rank of the peer to one of ours, the last chunk is known and all chunks
up to it are there, and the handoff state is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.transfer.extension import ForeignFrame
from diptych.transfer.ranks import HANDOFF_RANK
from diptych.transfer.wire import AuxLanded, Notification

# Until it is known who writes.
MAX_UNKNOWN_STREAMS = 4096


@dataclass(slots=True)
class _Stream:
    """What came in one stream. chunks: those beyond the first `num_in_order`, so that the set stays small."""

    num_in_order: int = 0
    chunks: set[int] = field(default_factory=set)
    last_chunk: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.last_chunk is not None and self.num_in_order == self.last_chunk + 1

    def add_chunk(self, chunk: int, *, is_last: bool) -> bool:
        """Whether the chunk is news. Raises ForeignFrame if it contradicts an earlier one."""
        seen = chunk < self.num_in_order or chunk in self.chunks
        if is_last:
            highest = max(self.chunks, default=self.num_in_order - 1)
            if self.last_chunk not in (None, chunk) or highest > chunk or (seen and self.last_chunk is None):
                raise ForeignFrame("notification", f"chunk {chunk} is said to be the last, after others beyond it")
            self.last_chunk = chunk
        elif self.last_chunk is not None and chunk >= self.last_chunk:
            raise ForeignFrame("notification", f"chunk {chunk} came, though {self.last_chunk} is the last")
        if seen:
            return False
        self.chunks.add(chunk)
        while self.num_in_order in self.chunks:
            self.chunks.remove(self.num_in_order)
            self.num_in_order += 1
        return True


class Landing:
    """One room's arrivals on a decode engine.

    streams: (writer, reader), ranks of the peer and of ours; None: not known yet, until `expect`, then is_expecting.
    max_chunks: bound on chunk numbers, from the prompt's length; beyond it a peer is talking nonsense.
    """

    def __init__(self, streams: Iterable[tuple[int, int]] | None, *, max_chunks: int) -> None:
        self.max_chunks = max_chunks
        self.num_duplicates = 0
        self._streams: dict[tuple[int, int], _Stream] = {}
        self.is_expecting = False
        self._has_aux = False
        if streams is not None:
            self.expect(streams)

    def expect(self, streams: Iterable[tuple[int, int]]) -> None:
        """Now it is known who writes; what others said is forgotten."""
        if not self.is_expecting:
            self.is_expecting = True
            self._streams = {stream: self._streams.get(stream, _Stream()) for stream in streams}

    @property
    def is_complete(self) -> bool:
        """Whether everything has landed."""
        return self.is_expecting and self._has_aux and not self.missing_streams

    @property
    def missing_streams(self) -> list[tuple[int, int]]:
        """Of which something is still to come."""
        return [name for name, stream in self._streams.items() if not stream.is_complete]

    def add(self, notification: Notification, reader: int = 0) -> bool:
        """Note one arrival at our rank `reader`; whether it was news (a repeated one is counted and harmless).

        Raises ForeignFrame for a writer that is not expected or a chunk that contradicts earlier ones.
        """
        if isinstance(notification, AuxLanded):
            if reader != HANDOFF_RANK or notification.writer not in (None, HANDOFF_RANK):
                raise _stranger(notification, reader)
            is_news = not self._has_aux
            self._has_aux = True
        else:
            if notification.chunk >= self.max_chunks:
                raise ForeignFrame("notification", f"chunk {notification.chunk} of at most {self.max_chunks}")
            stream = self._stream(notification, reader)
            is_news = stream.add_chunk(notification.chunk, is_last=notification.is_last)
        self.num_duplicates += not is_news
        return is_news

    def _stream(self, notification: Notification, reader: int) -> _Stream:
        writer = notification.writer
        if writer is None:
            raise _stranger(notification, reader)
        stream = self._streams.get((writer, reader))
        if stream is None and not self.is_expecting and len(self._streams) < MAX_UNKNOWN_STREAMS:
            stream = self._streams[writer, reader] = _Stream()
        if stream is None:
            raise _stranger(notification, reader)
        return stream


def _stranger(notification: Notification, reader: int) -> ForeignFrame:
    return ForeignFrame(
        "notification", f"room {notification.room}: rank {notification.writer} does not write to rank {reader} there"
    )
