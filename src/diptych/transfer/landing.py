"""What has arrived of one room, from notifications in any order. Pure; knows no pages and no sockets.

A room is complete when of every expected writer the last chunk is known, all chunks up to it and the handoff state are
there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.transfer.extension import ForeignFrame
from diptych.transfer.wire import AuxLanded, Notification


@dataclass(slots=True)
class _Writer:
    """What came from one writer. chunks: those beyond the first `num_in_order`, so that the set stays small."""

    num_in_order: int = 0
    chunks: set[int] = field(default_factory=set)
    last_chunk: int | None = None
    has_aux: bool = False

    @property
    def is_complete(self) -> bool:
        return self.has_aux and self.last_chunk is not None and self.num_in_order == self.last_chunk + 1

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
    """One room's arrivals on a decode rank. writers: prefill ranks that write here (base peers do not say: only one).

    max_chunks: bound on chunk numbers, from the prompt's length; beyond it a peer is talking nonsense.
    """

    def __init__(self, writers: Iterable[int], *, max_chunks: int) -> None:
        self.max_chunks = max_chunks
        self.num_duplicates = 0
        self._writers = {writer: _Writer() for writer in writers}
        self._num_missing = len(self._writers)

    @property
    def is_complete(self) -> bool:
        """Whether everything has landed."""
        return self._num_missing == 0

    @property
    def missing_writers(self) -> list[int]:
        """Ranks of which something is still to come."""
        return [rank for rank, writer in self._writers.items() if not writer.is_complete]

    def add(self, notification: Notification) -> bool:
        """Note one arrival; whether it was news (a repeated one is counted and harmless).

        Raises ForeignFrame for a writer that is not expected or a chunk that contradicts earlier ones.
        """
        writer = self._writer(notification)
        before = writer.is_complete
        if isinstance(notification, AuxLanded):
            is_news = not writer.has_aux
            writer.has_aux = True
        else:
            if notification.chunk >= self.max_chunks:
                raise ForeignFrame("notification", f"chunk {notification.chunk} of at most {self.max_chunks}")
            is_news = writer.add_chunk(notification.chunk, is_last=notification.is_last)
        self.num_duplicates += not is_news
        self._num_missing -= writer.is_complete and not before
        return is_news

    def _writer(self, notification: Notification) -> _Writer:
        rank = notification.writer
        if rank is None and len(self._writers) == 1:
            return next(iter(self._writers.values()))
        writer = None if rank is None else self._writers.get(rank)
        if writer is None:
            raise ForeignFrame(
                "notification", f"room {notification.room}: writer {rank} is not of {list(self._writers)}"
            )
        return writer
