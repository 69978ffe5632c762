"""Slots of adapters: what moves where, who waits, and that books add up whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.core.batch import NO_ADAPTER, AdapterPlacement
from diptych.core.request import Request, SamplingParams
from diptych.core.sequence import Sequence
from diptych.errors import InvariantError
from diptych.scheduler.adapter_slots import BASE_MODEL, AdapterSlots
from diptych.scheduler.policy import WaitingQueue, first_come_first_served


def sequence(order: int, adapter_id: int) -> Sequence:
    request = Request(request_id=str(order), prompt_token_ids=[1], sampling=SamplingParams(), adapter_id=adapter_id)
    return Sequence(request, [1], 8, arrival_order=order)


def test_an_adapter_keeps_its_slot_until_another_needs_it() -> None:
    slots = AdapterSlots(2)
    assert [slots.take(adapter_id) for adapter_id in (7, 8, 7)] == [0, 1, 0]
    assert slots.take_placements() == [AdapterPlacement(7, 0), AdapterPlacement(8, 1)]
    assert not slots.can_take(9)
    slots.give_back(7)
    assert not slots.can_take(9), "one sequence still uses it"
    slots.give_back(8)
    assert slots.take(8) == 1 and slots.take_placements() == [], "it is still there"
    slots.give_back(8)
    slots.give_back(7)
    slots.take(8)
    assert slots.take(9) == 0, "7 was unused for longest"
    assert slots.take_placements() == [AdapterPlacement(9, 0)]


def test_the_base_model_needs_no_slot() -> None:
    slots = AdapterSlots()
    assert slots.can_take(BASE_MODEL) and slots.take(BASE_MODEL) == NO_ADAPTER
    slots.give_back(BASE_MODEL)
    slots.check([BASE_MODEL])


def test_pinned_adapters_stay() -> None:
    slots = AdapterSlots(2)
    slots.pin(7)
    for adapter_id in (7, 8):
        slots.take(adapter_id)
        slots.give_back(adapter_id)
    assert slots.take(9) == 1
    with pytest.raises(InvariantError, match="2 adapters are pinned in 2 slots"):
        slots.pin(8)


def test_a_forgotten_adapter_leaves_no_placement() -> None:
    slots = AdapterSlots(1)
    slots.take(7)
    with pytest.raises(InvariantError, match="unloaded under 1 sequences"):
        slots.forget(7)
    slots.give_back(7)
    slots.forget(7)
    assert slots.take_placements() == []
    slots.check([])


def test_whoever_has_no_slot_blocks_nobody() -> None:
    slots = AdapterSlots(1)
    slots.take(7)
    queue = WaitingQueue(first_come_first_served, slots)
    for order, adapter_id in enumerate([8, BASE_MODEL, 9]):
        queue.push(sequence(order, adapter_id))
    assert queue.pop().request_id == "1"
    assert queue.peek() is None and len(queue) == 2
    slots.give_back(7)
    assert queue.pop().request_id == "0"


def test_a_busy_adapter_cannot_starve_another() -> None:
    """Those behind the first one that waits for a slot do not keep the slot busy, those before it may."""
    slots = AdapterSlots(1)
    slots.take(7)
    queue = WaitingQueue(first_come_first_served, slots)
    for order, adapter_id in [(5, 8), (6, 7), (3, 7)]:
        queue.push(sequence(order, adapter_id))
    assert queue.pop().request_id == "3"
    assert queue.peek() is None
    slots.give_back(7)
    assert queue.pop().request_id == "5"
    slots.take(8)
    slots.give_back(8)
    assert queue.pop().request_id == "6"


def test_a_claim_ends_with_who_made_it() -> None:
    slots = AdapterSlots(1)
    slots.take(7)
    queue = WaitingQueue(first_come_first_served, slots)
    claiming, behind = sequence(0, 8), sequence(1, 7)
    queue.push(claiming)
    queue.push(behind)
    assert queue.peek() is None
    queue.remove(claiming)
    assert queue.peek() is behind


class AdapterStorm(RuleBasedStateMachine):
    """Sequences of any adapters come, run and leave; adapters are unloaded. Who waits is served in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(2)
        self.queue = WaitingQueue(first_come_first_served, self.slots)
        self.running: list[Sequence] = []
        self.placed: dict[int, int] = {}
        self.num_arrivals = 0

    @rule(adapter_id=st.integers(0, 5))
    def arrive(self, adapter_id: int) -> None:
        self.num_arrivals += 1
        self.queue.push(sequence(self.num_arrivals, adapter_id))

    @rule()
    def admit(self) -> None:
        if self.queue.peek() is None:
            return
        admitted = self.queue.pop()
        slot = self.slots.take(admitted.request.adapter_id)
        self.placed |= {placement.slot: placement.adapter_id for placement in self.slots.take_placements()}
        assert (slot == NO_ADAPTER) == (admitted.request.adapter_id == BASE_MODEL)
        assert slot == NO_ADAPTER or self.placed[slot] == admitted.request.adapter_id
        self.running.append(admitted)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.slots.give_back(gone.request.adapter_id)

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        waiting = sorted(self.queue, key=lambda each: each.arrival_order)
        self.queue.remove(waiting[data.draw(st.integers(0, len(waiting) - 1))])

    @rule(adapter_id=st.integers(1, 5))
    def unload(self, adapter_id: int) -> None:
        if all(each.request.adapter_id != adapter_id for each in (*self.queue, *self.running)):
            self.slots.forget(adapter_id)

    @invariant()
    def books_add_up(self) -> None:
        self.slots.check([each.request.adapter_id for each in self.running])
        if not self.running and len(self.queue):
            assert self.queue.peek() is not None, "nothing runs, and yet nobody may"

    def teardown(self) -> None:
        """Whatever has happened, all that wait are served, the first in line first among those of an adapter."""
        while len(self.queue) or self.running:
            while self.queue.peek() is not None:
                self.admit()
            assert self.running
            self.slots.give_back(self.running.pop(0).request.adapter_id)


TestAdapterStorm = AdapterStorm.TestCase
TestAdapterStorm.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
