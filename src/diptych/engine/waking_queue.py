"""A queue that other threads fill, with a descriptor that a poller waits for. Knows nothing of what is in it."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class WakingQueue(Generic[Item]):
    """First in, first out; any thread puts, one takes. wake_fd: readable when `take` may have something."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.wake_fd, self._wake_write = os.pipe()
        os.set_blocking(self.wake_fd, False)

    def put(self, item: Item) -> None:
        """Queue it; on any thread."""
        # The byte first: whoever finds the item finds its byte, too.
        os.write(self._wake_write, b"\0")
        self._items.put(item)

    def take(self) -> Item | None:
        """The oldest item, None if there is none."""
        try:
            item = self._items.get_nowait()
        except queue.Empty:
            return None
        os.read(self.wake_fd, 1)
        return item

    def take_all(self) -> list[Item]:
        """All that is there, oldest first."""
        taken = []
        while (item := self.take()) is not None:
            taken.append(item)
        return taken

    def close(self) -> None:
        """Close the descriptor; nobody puts any more."""
        os.close(self.wake_fd)
        os.close(self._wake_write)
