"""The life of one room's transfer, the same machine on both ends. Pure: no sockets, no clocks, no tensors.

Owns the one table of states and events. Who owns the pages follows from the state: until DONE or FAILED the transfer
does, and DRAINING is the quarantine in which it is lost already but a posted write may still land. Events are about the
whole room: with several writers the caller reports one only when it holds for all of them (LANDED, REJECTED, QUIESCED)
or for the first of them (STARTED, and every way to give up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from diptych.errors import InvariantError


class State(Enum):
    """Where a transfer is. The value says what that means."""

    REQUESTED = "asked for; a write may start at any moment"
    ACTIVE = "at least one write was posted"
    DRAINING = "given up; a posted write may still land, so the pages stay in quarantine"
    DONE = "everything has landed; the pages have passed on"
    FAILED = "given up, and nothing can land any more; the pages may be freed"


class Event(Enum):
    """What happens to a transfer. The value says when the caller reports it."""

    STARTED = "the first write was posted (prefill), or the first notification seen (decode)"
    LANDED = "every expected writer has finished its last write"
    REJECTED = "the peer refused before any of its ranks had posted a write"
    CANCELLED = "the client went away"
    ERRORED = "a write failed, or the computation behind it did"
    EXPIRED = "the deadline passed"
    PEER_LOST = "the peer is dead, restarted or silent"
    QUIESCED = "no write can land any more: the peer said so, or its death is confirmed"


LIVE = (State.REQUESTED, State.ACTIVE)
TERMINAL = (State.DONE, State.FAILED)
GIVE_UP = (Event.CANCELLED, Event.ERRORED, Event.EXPIRED, Event.PEER_LOST)

TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.REQUESTED, Event.STARTED): State.ACTIVE,
        (State.REQUESTED, Event.LANDED): State.DONE,
        (State.REQUESTED, Event.REJECTED): State.FAILED,
        (State.ACTIVE, Event.LANDED): State.DONE,
        **{(state, event): State.DRAINING for state in LIVE for event in GIVE_UP},
        (State.DRAINING, Event.QUIESCED): State.FAILED,
        (State.DRAINING, Event.LANDED): State.FAILED,
        (State.DRAINING, Event.REJECTED): State.FAILED,  # our cancel and the peer's refusal crossed
        # Late news of a transfer given up, or over, is expected: the two ends hear of things in different order.
        **{(State.DRAINING, event): State.DRAINING for event in (*GIVE_UP, Event.STARTED)},
        **{(state, event): state for state in TERMINAL for event in Event},
    }
)


@dataclass(slots=True, eq=False)
class Transfer:
    """One room on one end. pages: the transfer's own while `owns_pages`. cause: why it was given up first."""

    room: int
    pages: tuple[int, ...] = ()
    state: State = State.REQUESTED
    cause: Event | None = None

    @property
    def owns_pages(self) -> bool:
        """Whether a write may still land in the pages (or read them): nobody else may have them."""
        return self.state not in TERMINAL

    @property
    def is_live(self) -> bool:
        """Whether it can still succeed."""
        return self.state in LIVE

    def expects(self, event: Event) -> bool:
        """Whether the table lists `event` now. What a peer says must be asked here first: its bug is not ours."""
        return (self.state, event) in TRANSITIONS

    def on(self, event: Event) -> State:
        """Apply one event; the only place where `state` changes. Raises InvariantError for an unlisted one."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise InvariantError(f"room {self.room}: {event.name} in state {self.state.name} is not a transition")
        if self.cause is None and state is not self.state and state in (State.DRAINING, State.FAILED):
            self.cause = event
        self.state = state
        return state


def markdown_tables() -> str:
    """The states, events and transitions as the Markdown tables of docs/pd.md; `-` is an event that must not happen."""
    lines = ["| state | pages | meaning |", "|---|---|---|"]
    lines += [f"| {state.name} | {_owner(state)} | {state.value} |" for state in State]
    lines += ["", "| event | reported when |", "|---|---|"]
    lines += [f"| {event.name} | {event.value} |" for event in Event]
    lines += ["", "| | " + " | ".join(state.name for state in State) + " |", "|---" * (len(State) + 1) + "|"]
    for event in Event:
        cells = [_cell(state, event) for state in State]
        lines.append(f"| {event.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _owner(state: State) -> str:
    if Transfer(0, state=state).owns_pages:
        return "the transfer"
    return "the sequence" if state is State.DONE else "the allocator"


def _cell(state: State, event: Event) -> str:
    following = TRANSITIONS.get((state, event))
    if following is None:
        return "-"
    return "stays" if following is state else following.name
