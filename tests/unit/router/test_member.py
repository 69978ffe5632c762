"""The state machine of one engine, and its breaker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.router.config import EngineAddress, RouterConfig
from diptych.router.member import MAX_BREAKER_PAUSE_S, TRANSITIONS, Breaker, Event, Member, State

CONFIG = RouterConfig(health_failures=2, breaker_failures=3, breaker_pause=5.0)


def member_in(state: State) -> Member:
    member = Member(EngineAddress(url="http://e"), CONFIG)
    member.state = state
    return member


def test_every_state_has_a_row_of_every_event():
    assert set(TRANSITIONS) == set(State)
    assert all(set(row) == set(Event) for row in TRANSITIONS.values())


def test_every_state_is_reachable_and_only_removal_is_final():
    assert {state for row in TRANSITIONS.values() for state in row.values()} == set(State)
    final = [state for state, row in TRANSITIONS.items() if set(row.values()) == {state}]
    assert final == [State.REMOVED]


def test_an_engine_comes_back_in_two_steps():
    member = member_in(State.JOINING)
    member.note_answered(0.0)
    member.note_probe_failed("refused")
    assert member.state is State.SUSPECT
    member.note_probe_failed("refused")
    assert member.state is State.DOWN
    member.note_answered(1.0)
    assert member.state is State.SUSPECT
    member.note_answered(2.0)
    assert member.state is State.HEALTHY


def test_a_success_between_failures_starts_the_count_anew():
    member = member_in(State.HEALTHY)
    for _ in range(3):
        member.note_probe_failed("slow")
        member.note_answered(0.0)
    assert member.state is State.HEALTHY


def test_requests_that_lose_their_connection_make_suspect_not_lost():
    member = member_in(State.HEALTHY)
    member.note_disconnected("reset", 0.0)
    member.note_disconnected("reset", 0.0)
    assert member.state is State.SUSPECT
    member.note_disconnected("reset", 0.0)  # but the breaker has seen enough
    assert member.state is State.DOWN


@pytest.mark.parametrize("state", [State.HEALTHY, State.SUSPECT])
def test_a_draining_engine_is_left_at_once(state):
    member = member_in(state)
    member.note_refused()
    assert member.state is State.DRAINING


def test_changes_are_told_with_their_cause():
    told = []
    member = Member(EngineAddress(url="http://e"), CONFIG, on_change=lambda one, event: told.append((one.state, event)))
    member.note_answered(0.0)
    member.note_answered(0.0)
    for _ in range(3):
        member.note_probe_failed("x")
    assert told == [
        (State.HEALTHY, Event.ANSWERED),
        (State.SUSPECT, Event.FAILED),
        (State.DOWN, Event.LOST),
        (State.DOWN, Event.LOST),
    ]


def test_load_is_ours_and_others():
    member = member_in(State.HEALTHY)
    member.num_active = 3
    member.note_load(5.0)
    assert member.load == 5.0
    member.num_active = 1
    assert member.load == 3.0
    member.note_load(0.0)
    assert member.load == 1.0


def test_the_breaker_opens_for_longer_each_time_until_a_success():
    breaker = Breaker(max_failures=3, pause_s=5.0)
    assert [breaker.note_failure(0.0) for _ in range(3)] == [False, False, True]
    assert breaker.is_open(4.9)
    assert not breaker.is_open(5.0)
    assert breaker.note_failure(6.0)  # on probation one is enough
    assert breaker.is_open(15.9)
    breaker.note_success()
    assert [breaker.note_failure(20.0) for _ in range(3)] == [False, False, True]
    assert not breaker.is_open(25.0)


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=50))
def test_the_breaker_never_opens_below_its_limit_nor_beyond_its_longest_pause(limit, outcomes):
    breaker = Breaker(max_failures=limit, pause_s=1.0)
    now, in_a_row, was_open = 0.0, 0, False
    for is_failure in outcomes:
        now = max(now + 0.1, breaker.opened_until)
        if not is_failure:
            breaker.note_success()
            in_a_row, was_open = 0, False
            continue
        in_a_row += 1
        opened = breaker.note_failure(now)
        assert opened == (in_a_row >= limit or was_open)
        was_open = was_open or opened
        assert breaker.opened_until - now <= MAX_BREAKER_PAUSE_S


class MemberMachine(RuleBasedStateMachine):
    """Any order of what can happen to an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.member = member_in(State.JOINING)
        self.now = 0.0
        self.failures = 0
        self.was_removed = False

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def answer(self):
        self.failures = 0
        self.member.note_answered(self.now)

    @rule()
    def refuse(self):
        self.failures = 0
        self.member.note_refused()
        assert self.member.state not in (State.HEALTHY, State.SUSPECT)

    @rule()
    def fail(self):
        self.failures += 1
        self.member.note_probe_failed("x")
        assert self.member.state is not State.HEALTHY
        if self.failures >= CONFIG.health_failures:
            assert self.member.state in (State.JOINING, State.DOWN, State.REMOVED)

    @rule()
    def lose_a_request(self):
        self.member.note_disconnected("x", self.now)
        assert self.member.state is not State.HEALTHY

    @rule()
    def fail_a_request(self):
        self.member.note_request_failed("x", self.now)

    @rule()
    def serve_a_request(self):
        self.member.note_request_done()

    @precondition(lambda self: not self.was_removed)
    @rule()
    def remove(self):
        self.was_removed = True
        self.member.remove()

    @invariant()
    def removal_is_final(self):
        assert (self.member.state is State.REMOVED) == self.was_removed

    @invariant()
    def an_open_breaker_keeps_requests_away(self):
        if self.member.breaker.is_open(self.now):
            assert self.member.state not in (State.HEALTHY, State.SUSPECT) or not self.member.was_usable


TestMember = MemberMachine.TestCase
