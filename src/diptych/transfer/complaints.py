"""Log lines about what others do wrong, at most one a minute for each kind and address; the next one says how many more
there were. Whoever floods us must not fill the disk. Counts what it is told, knows nothing of what that was.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

INTERVAL_S = 60.0
# Addresses are what strangers say of themselves: those beyond the most recent ones of a minute share a line.
MAX_ADDRESSES = 64
OTHERS = "others"


@dataclass(slots=True)
class _Topic:
    """One kind and address. silent_until: when the next line may be written; num_silent: not written since the last."""

    silent_until: float
    num_silent: int = 0


class Complaints:
    """The lines of one logger. totals: of each kind, written or not. now: seconds, set by whoever keeps time."""

    def __init__(self, logger: logging.Logger) -> None:
        self.totals: Counter[str] = Counter()
        self.now = 0.0
        self._logger = logger
        self._topics: dict[tuple[str, str], _Topic] = {}

    def say(self, kind: str, address: str, text: str, *, level: int = logging.WARNING) -> None:
        """Log `text` about `address`, unless there was a line of this kind about it within the last minute."""
        self.totals[kind] += 1
        topic = self._topic(kind, address)
        if self.now < topic.silent_until:
            topic.num_silent += 1
            return
        more = f" ({topic.num_silent} more of this kind since the last such line)" if topic.num_silent else ""
        self._logger.log(level, "%s%s", text, more)
        topic.silent_until, topic.num_silent = self.now + INTERVAL_S, 0

    def _topic(self, kind: str, address: str) -> _Topic:
        key = (kind, address)
        if key not in self._topics and sum(known == kind for known, _ in self._topics) >= MAX_ADDRESSES:
            self._topics = {k: topic for k, topic in self._topics.items() if self._is_of_use(topic)}
            if sum(known == kind for known, _ in self._topics) >= MAX_ADDRESSES:
                key = (kind, OTHERS)
        return self._topics.setdefault(key, _Topic(self.now))

    def _is_of_use(self, topic: _Topic) -> bool:
        return self.now < topic.silent_until + (INTERVAL_S if topic.num_silent else 0.0)
