"""One engine as the router sees it: the state machine of its health, its circuit breaker, its load.

    JOINING   never answered yet: gets nothing
    HEALTHY   takes requests
    SUSPECT   failed once, or just came back: takes requests only if nobody is healthy
    DOWN      failed too often: gets nothing until it answers again
    DRAINING  says 503 on /health: finishes what it has
    REMOVED   by an operator: finishes what it has, and is forgotten then

Pure: time is passed in, and nothing here talks to an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from diptych.errors import InvariantError
from diptych.router.config import DEFAULT_BOOTSTRAP_PORT, EngineAddress, Role, RouterConfig

logger = logging.getLogger(__name__)

MAX_BREAKER_PAUSE_S = 60.0


class State(StrEnum):
    """Of one engine; see the module."""

    JOINING = "joining"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"
    REMOVED = "removed"


class Event(StrEnum):
    """What happens to an engine. FAILED: a probe or a connection; LOST: it was one too many."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    LOST = "lost"
    TRIPPED = "tripped"
    REMOVE = "remove"


_S, _E = State, Event
# Every state has a row of every event; what is not listed would be a bug.
TRANSITIONS: dict[State, dict[Event, State]] = {
    _S.JOINING: {
        _E.ANSWERED: _S.HEALTHY,
        _E.REFUSED: _S.JOINING,
        _E.FAILED: _S.JOINING,
        _E.LOST: _S.JOINING,
        _E.TRIPPED: _S.JOINING,
        _E.REMOVE: _S.REMOVED,
    },
    _S.HEALTHY: {
        _E.ANSWERED: _S.HEALTHY,
        _E.REFUSED: _S.DRAINING,
        _E.FAILED: _S.SUSPECT,
        _E.LOST: _S.DOWN,
        _E.TRIPPED: _S.DOWN,
        _E.REMOVE: _S.REMOVED,
    },
    _S.SUSPECT: {
        _E.ANSWERED: _S.HEALTHY,
        _E.REFUSED: _S.DRAINING,
        _E.FAILED: _S.SUSPECT,
        _E.LOST: _S.DOWN,
        _E.TRIPPED: _S.DOWN,
        _E.REMOVE: _S.REMOVED,
    },
    _S.DOWN: {
        _E.ANSWERED: _S.SUSPECT,
        _E.REFUSED: _S.JOINING,
        _E.FAILED: _S.DOWN,
        _E.LOST: _S.DOWN,
        _E.TRIPPED: _S.DOWN,
        _E.REMOVE: _S.REMOVED,
    },
    _S.DRAINING: {
        _E.ANSWERED: _S.HEALTHY,
        _E.REFUSED: _S.DRAINING,
        _E.FAILED: _S.DRAINING,
        _E.LOST: _S.DOWN,
        _E.TRIPPED: _S.DRAINING,
        _E.REMOVE: _S.REMOVED,
    },
    _S.REMOVED: dict.fromkeys(_E, _S.REMOVED),
}


@dataclass(kw_only=True)
class Breaker:
    """Stops requests to an engine that answers /health but fails what it is asked to do.

    After `max_failures` in a row it opens for `pause_s`. Then the engine is on probation: one more failure opens it
    again, for twice as long; one success closes it.
    """

    max_failures: int
    pause_s: float
    num_failures: int = 0
    opened_until: float = 0.0
    _next_pause_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_pause_s = self.pause_s

    def is_open(self, now: float) -> bool:
        """Whether the engine is to be left alone."""
        return now < self.opened_until

    def note_success(self) -> None:
        """A request was answered."""
        self.num_failures = 0
        self._next_pause_s = self.pause_s

    def note_failure(self, now: float) -> bool:
        """A request failed. Returns whether that opened it."""
        self.num_failures += 1
        if self.num_failures < self.max_failures or self.is_open(now):
            return False
        self.opened_until = now + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, MAX_BREAKER_PAUSE_S)
        self.num_failures = self.max_failures - 1
        return True


class Member:
    """An engine of the pool.

    Args: on_change: told after every change of state what caused it, and of every LOST.
    """

    def __init__(
        self,
        address: EngineAddress,
        config: RouterConfig,
        *,
        on_change: Callable[[Member, Event], None] = lambda member, event: None,
    ) -> None:
        self.address = address
        self.role = address.role or Role.UNIFIED
        self.bootstrap_port = address.bootstrap_port or DEFAULT_BOOTSTRAP_PORT
        self.models: frozenset[str] = frozenset()
        self.state = State.JOINING
        self.was_usable = False
        self.breaker = Breaker(max_failures=config.breaker_failures, pause_s=config.breaker_pause)
        self.num_active = 0
        self.pending_tokens = 0
        self.loads: list[dict[str, object]] = []
        self.last_error = ""
        self._max_failures = config.health_failures
        self._num_failures = 0
        self._others_load = 0.0
        self._on_change = on_change

    @property
    def url(self) -> str:
        """Its address and its name."""
        return self.address.url

    @property
    def load(self) -> float:
        """Requests that it works on: ours now, and other routers' when it was last asked."""
        return self.num_active + self._others_load

    def note_load(self, num_requests: float) -> None:
        """It reported so many requests, running or waiting."""
        self._others_load = max(0.0, num_requests - self.num_active)

    def note_answered(self, now: float) -> None:
        """/health said 200. That alone does not end the breaker's pause."""
        self._num_failures = 0
        if not self.breaker.is_open(now):
            self._apply(Event.ANSWERED)

    def note_refused(self) -> None:
        """/health said 503: it loads or drains."""
        self._num_failures = 0
        self._apply(Event.REFUSED)

    def note_probe_failed(self, reason: str) -> None:
        """A probe failed; enough of them in a row, and the engine is lost."""
        self.last_error = reason
        self._num_failures += 1
        self._apply(Event.LOST if self._num_failures >= self._max_failures else Event.FAILED)

    def note_disconnected(self, reason: str, now: float) -> None:
        """A request got no connection, or lost it: others are better until a probe has looked."""
        self.last_error = reason
        self._apply(Event.FAILED)
        self.note_request_failed(reason, now)

    def note_request_failed(self, reason: str, now: float) -> None:
        """It took a request and failed it."""
        self.last_error = reason
        if self.breaker.note_failure(now):
            self._apply(Event.TRIPPED)

    def note_request_done(self) -> None:
        """It took a request and answered it, if only to refuse it."""
        self.breaker.note_success()

    def remove(self) -> None:
        """An operator takes it out."""
        self._apply(Event.REMOVE)

    def _apply(self, event: Event) -> None:
        before = self.state
        row = TRANSITIONS[before]
        if event not in row:
            raise InvariantError(f"engine {self.url}: {event} must not happen in state {before}")
        self.state = row[event]
        if self.state is not before:
            self.was_usable = self.was_usable or self.state is State.HEALTHY
            self._log(event, before)
        if self.state is not before or event is Event.LOST:
            self._on_change(self, event)

    def _log(self, event: Event, before: State) -> None:
        if event in (Event.FAILED, Event.LOST, Event.TRIPPED):
            text = "engine %s (%s): %s -> %s: %s"
            logger.warning(text, self.url, self.role, before, self.state, self.last_error)
        else:
            logger.info("engine %s (%s): %s -> %s", self.url, self.role, before, self.state)
