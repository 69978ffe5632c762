from __future__ import annotations

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from diptych.errors import InvariantError
from diptych.kv.allocator import PageAllocator, runs_of


def allocator_with_holes(num_pages: int, holes: list[range]) -> PageAllocator:
    """All pages taken but those of `holes`."""
    allocator = PageAllocator(num_pages)
    allocator.allocate(num_pages)
    for hole in holes:
        allocator.free(list(hole))
    return allocator


def test_a_fresh_pool_gives_ascending_adjacent_pages() -> None:
    allocator = PageAllocator(10)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    assert allocator.allocate(6) == [4, 5, 6, 7, 8, 9]
    assert allocator.num_free == 0


def test_all_or_nothing() -> None:
    allocator = PageAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert allocator.allocate(0) == []


def test_the_smallest_run_that_fits_is_taken() -> None:
    allocator = allocator_with_holes(30, [range(9), range(12, 15), range(20, 24)])
    assert allocator.allocate(3) == [12, 13, 14]
    assert allocator.allocate(3) == [20, 21, 22]
    assert allocator.allocate(1) == [23]


def test_without_a_run_that_fits_the_fewest_runs_are_taken() -> None:
    allocator = allocator_with_holes(40, [range(2), range(10, 16), range(20, 24), range(30, 33)])
    pages = allocator.allocate(9)
    assert pages == [*range(10, 16), *range(30, 33)]


def test_the_page_after_is_preferred() -> None:
    allocator = allocator_with_holes(30, [range(1), range(10, 20)])
    assert allocator.allocate(1, after=9) == [10]
    assert allocator.allocate(2, after=10) == [11, 12]
    assert allocator.allocate(1, after=25) == [0]  # 26 is taken: best fit


def test_the_page_after_is_preferred_even_if_its_run_is_too_short() -> None:
    allocator = allocator_with_holes(40, [range(6, 8), range(20, 25), range(30, 39)])
    assert allocator.allocate(5, after=5) == [6, 7, 20, 21, 22]
    allocator.check()


def test_freed_neighbours_join() -> None:
    allocator = PageAllocator(9)
    first, second, third = allocator.allocate(3), allocator.allocate(3), allocator.allocate(3)
    assert first is not None and second is not None and third is not None
    allocator.free(first)
    allocator.free(third)
    allocator.free(second)
    assert allocator.allocate(9) == list(range(9))


@pytest.mark.parametrize("pages", [[3], [0, 3], [-1], [99], [5], [0, 0], [2, 3]])
def test_free_or_foreign_pages_are_refused_and_nothing_is_freed(pages: list[int]) -> None:
    allocator = PageAllocator(5)
    allocator.allocate(3)
    with pytest.raises(InvariantError):
        allocator.free(pages)
    assert allocator.num_free == 2
    allocator.check()


def test_runs_of() -> None:
    assert list(runs_of([])) == []
    assert list(runs_of([1, 2, 3, 7, 9, 10])) == [(1, 4), (7, 8), (9, 11)]


def test_check_notices_a_lost_page() -> None:
    allocator = PageAllocator(5)
    allocator._num_free -= 1
    with pytest.raises(InvariantError):
        allocator.check()


def test_a_million_scattered_pages_stay_cheap() -> None:
    """Guards against anything linear in the pool; the limits are 20 times what it takes."""
    allocator = PageAllocator(1_000_000)
    pages = allocator.allocate(1_000_000)
    assert pages is not None
    scattered = random.Random(0).sample(pages, 100_000)
    allocator.free(scattered)
    started = time.perf_counter()
    for _ in range(10_000):
        assert allocator.allocate(1) is not None
    assert allocator.allocate(40_000) is not None
    assert time.perf_counter() - started < 1.0


class AllocatorMachine(RuleBasedStateMachine):
    """Against a set of free pages; `check` after each rule."""

    NUM_PAGES = 24
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES)
        self.free_pages = set(range(self.NUM_PAGES))

    def longest_run(self) -> int:
        return max((end - start for start, end in runs_of(sorted(self.free_pages))), default=0)

    @rule(target=held, count=st.integers(0, 10), after=st.none() | st.integers(0, NUM_PAGES - 1))
    def allocate(self, count: int, after: int | None) -> list[int]:
        longest = self.longest_run()
        is_after_free = after is not None and after not in self.free_pages and after + 1 in self.free_pages
        pages = self.allocator.allocate(count, after=after)
        if count > len(self.free_pages):
            assert pages is None
            return []
        assert pages is not None and len(pages) == count and pages == sorted(set(pages))
        assert self.free_pages.issuperset(pages)
        if count and is_after_free:
            assert after is not None and after + 1 in pages
        elif count:
            assert (len(list(runs_of(pages))) == 1) == (count <= longest)
        self.free_pages -= set(pages)
        return pages

    @rule(pages=consumes(held), rest=st.integers(0, 10), randomness=st.randoms(use_true_random=False))
    def free_some(self, pages: list[int], rest: int, randomness: random.Random) -> None:
        randomness.shuffle(pages)
        for part in (pages[:rest], pages[rest:]):
            self.allocator.free(part)
            self.free_pages |= set(part)

    @rule(page=st.integers(-2, NUM_PAGES + 1))
    def free_wrongly(self, page: int) -> None:
        if page in self.free_pages or not 0 <= page < self.NUM_PAGES:
            with pytest.raises(InvariantError):
                self.allocator.free([page])

    @invariant()
    def books_balance(self) -> None:
        self.allocator.check()
        assert set(self.allocator.free_pages()) == self.free_pages
        assert self.allocator.num_free == len(self.free_pages)


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
