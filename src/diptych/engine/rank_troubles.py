"""Why an engine of several ranks ends: of all that is said when one fails, what was the cause.

When a rank dies, the others soon report that they lost it, and then end themselves. Whoever says it first need not know
best. Knows no socket and no process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diptych.core.ranks import RankFailed
from diptych.errors import DiptychError, RankLost, error_of_kind

# A rank that failed says why, and then its process ends: the end may be seen first.
SETTLE_S = 0.2


@dataclass(frozen=True)
class _Trouble:
    """weight: 0 what a rank says of itself, 1 what is seen of its process or node, 2 what a rank says of others."""

    weight: int
    error: DiptychError


class Troubles:
    """What has been heard, and since when."""

    def __init__(self) -> None:
        self._heard: list[_Trouble] = []
        self._since = 0.0

    @property
    def has_any(self) -> bool:
        """Whether the engine must end."""
        return bool(self._heard)

    def add_failed(self, name: str, failed: RankFailed) -> None:
        """A rank's own last words. Args: name: such as "rank 1"."""
        is_own = failed.kind != RankLost.__name__
        self._heard.append(_Trouble(0 if is_own else 2, error_of_kind(failed.kind, f"{name}: {failed.message}")))

    def add_lost(self, what: str, rank: int | None = None) -> None:
        """A rank, or a node with its ranks, is gone. what: a sentence that names it."""
        self._heard.append(_Trouble(1, RankLost(f"{what}; the engine must be restarted", rank=rank)))

    def cause(self, now: float, *, settle_s: float) -> DiptychError | None:
        """What to end with, once it is clear: at once for what a rank says of itself, after a moment for the end of a
        process, after `settle_s` seconds if nothing but the complaints of others is heard.
        """
        if not self._heard:
            return None
        self._since = self._since or now
        best = min(self._heard, key=lambda trouble: trouble.weight)
        patience_s = (0.0, SETTLE_S, settle_s)[best.weight]
        return best.error if now - self._since >= patience_s else None


class SignsOfLife:
    """When each was last heard; who has never spoken is not missed."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}

    def note(self, name: str, now: float) -> None:
        """It spoke."""
        self._heard[name] = now

    def silent(self, names: Iterable[str], now: float, limit_s: float) -> list[str]:
        """Who has said nothing for longer than this; each is returned once."""
        found = [name for name in names if now - self._heard.get(name, now) > limit_s]
        for name in found:
            del self._heard[name]
        return found
