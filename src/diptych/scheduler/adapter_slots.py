"""Which adapters are on the device, and who may run for want of a slot there. Engine thread; never imports torch.

An adapter keeps its slot while a seated sequence uses it, and after that until another needs the slot: the one unused
for longest goes first, pinned ones never. Where all slots are in use, the first sequence in line for another adapter
claims one: those behind it wait, too, if they would keep busy the adapter that has fewest users.
"""

from __future__ import annotations

from collections import deque

from diptych.core.batch import NO_ADAPTER, AdapterPlacement
from diptych.core.sequence import Sequence
from diptych.errors import InvariantError
from diptych.kv.cache import SequencePages

BASE_MODEL = 0
"""In place of an adapter's number."""

Place = tuple[int, int]
"""Where a sequence stands in the line: lower goes first."""


class AdapterSlots:
    """`num_slots` places on the device, all empty at first. Adapters go by the engine's numbers."""

    def __init__(self, num_slots: int = 0) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}  # the one unused for longest first
        self._users: dict[int, int] = {}  # seated sequences, of adapters that have any
        self._pinned: set[int] = set()
        self._placements: list[AdapterPlacement] = []
        self._claim: tuple[Place, int] | None = None
        self._victim: int | None = None
        self._has_news = False

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def pin(self, adapter_id: int) -> None:
        """Never give this adapter's slot to another, once it has one. At least one slot must be left for the others."""
        self._pinned.add(adapter_id)
        if len(self._pinned) >= self._num_slots:
            raise InvariantError(f"{len(self._pinned)} adapters are pinned in {self._num_slots} slots")

    def forget(self, adapter_id: int) -> None:
        """It is unloaded: its slot is free. No sequence may use it."""
        if adapter_id in self._users:
            raise InvariantError(f"adapter {adapter_id} is unloaded under {self._users[adapter_id]} sequences")
        self._pinned.discard(adapter_id)
        self._placements = [placement for placement in self._placements if placement.adapter_id != adapter_id]
        slot = self._slot_of.pop(adapter_id, None)
        if slot is not None:
            self._free.append(slot)
            self._has_news = True

    def may_run(self, adapter_id: int, place: Place) -> bool:
        """Whether a sequence at this place in the line may be seated now, as far as its adapter goes."""
        if self.can_take(adapter_id):
            is_in_the_way = adapter_id == self._victim and self._claim is not None and place > self._claim[0]
            return not is_in_the_way
        if self._claim is None or place < self._claim[0]:
            self._claim = (place, adapter_id)
            candidates = [each for each in self._slot_of if each not in self._pinned]
            self._victim = min(candidates, key=lambda each: self._users.get(each, 0))
        return False

    def can_take(self, adapter_id: int) -> bool:
        """Whether `take` has a slot for it."""
        return adapter_id == BASE_MODEL or adapter_id in self._slot_of or bool(self._free) or bool(self._evictable())

    def bring_forward(self, landed: deque[tuple[Sequence, SequencePages]]) -> bool:
        """Turn sequences that a peer has filled until the first one's adapter has a slot; False where none has."""
        for _ in range(len(landed)):
            if self.can_take(landed[0][0].request.adapter_id):
                return True
            landed.rotate(-1)
        return False

    def take(self, adapter_id: int) -> int:
        """The slot of an adapter for one sequence more, which is moved there with the next batch if need be."""
        if adapter_id == BASE_MODEL:
            return NO_ADAPTER
        slot = self._slot_of.pop(adapter_id, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._slot_of.pop(self._evictable()[0])
            self._placements.append(AdapterPlacement(adapter_id, slot))
        self._slot_of[adapter_id] = slot
        self._users[adapter_id] = self._users.get(adapter_id, 0) + 1
        if self._claim is not None and self._claim[1] == adapter_id:
            self.drop_claim()
        return slot

    def give_back(self, adapter_id: int) -> None:
        """A sequence that took it is not seated any more, and no step in flight has a row of it."""
        if adapter_id == BASE_MODEL:
            return
        self._users[adapter_id] -= 1
        if not self._users[adapter_id]:
            del self._users[adapter_id]
            self._has_news = True

    def drop_claim(self) -> None:
        """Who claimed a slot has one, or waits no longer: whoever is next in line may claim again."""
        self._claim = self._victim = None
        self._has_news = True

    def take_news(self) -> bool:
        """Whether a slot may have come free since the last call."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def take_placements(self) -> list[AdapterPlacement]:
        """What must move before the next batch is computed."""
        placements, self._placements = self._placements, []
        return placements

    def num_users(self, adapter_id: int) -> int:
        """Seated sequences that use it."""
        return self._users.get(adapter_id, 0)

    def check(self, seated: list[int]) -> None:
        """Raise InvariantError unless slots add up. seated: the adapter of every seated sequence."""
        slots = sorted([*self._free, *self._slot_of.values()])
        users = {each: seated.count(each) for each in set(seated) if each != BASE_MODEL}
        if slots != list(range(self._num_slots)) or users != self._users or not set(users) <= set(self._slot_of):
            raise InvariantError(
                f"adapters do not add up: free {self._free}, in slots {self._slot_of}, used {self._users}, "
                f"seated {users}"
            )

    def _evictable(self) -> list[int]:
        return [each for each in self._slot_of if each not in self._users and each not in self._pinned]
