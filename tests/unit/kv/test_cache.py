from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from diptych.errors import InvariantError
from diptych.kv.cache import KVCache, SequencePages


def make(num_pages: int = 10, *, prefix_caching: bool = True) -> KVCache:
    return KVCache(num_pages, 2, prefix_caching=prefix_caching)


def opened(cache: KVCache, token_ids: list[int], num_tokens: int | None = None) -> SequencePages:
    pages = cache.open(token_ids, "", num_tokens=len(token_ids) if num_tokens is None else num_tokens)
    assert pages is not None
    return pages


def test_open_leases_the_cached_prefix_and_owns_the_rest() -> None:
    cache = make()
    cache.close(opened(cache, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    pages = opened(cache, [1, 2, 3, 4, 5], num_tokens=6)
    assert (pages.pages, pages.num_leased, pages.owned_pages) == ([0, 1, 2], 2, [2])
    assert (cache.num_free, cache.num_cached, cache.num_evictable, cache.num_owned) == (7, 2, 0, 1)
    cache.check()


def test_the_last_token_is_always_computed() -> None:
    cache = make()
    cache.close(opened(cache, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    assert cache.match_length([1, 2, 3, 4], "") == 2
    assert cache.match_length([1, 2, 3, 4, 5], "") == 4
    assert cache.match_length([], "") == 0
    assert opened(cache, [1, 2, 3, 4]).num_leased == 1


@pytest.mark.parametrize(("max_cached_tokens", "num_leased"), [(0, 0), (1, 0), (3, 1), (99, 2), (None, 2)])
def test_max_cached_tokens_bounds_the_lease(max_cached_tokens: int | None, num_leased: int) -> None:
    cache = make()
    cache.close(opened(cache, [1, 2, 3, 4, 5]), [1, 2, 3, 4, 5], 5)
    pages = cache.open([1, 2, 3, 4, 5], "", num_tokens=5, max_cached_tokens=max_cached_tokens)
    assert pages is not None
    assert (pages.num_leased, len(pages.pages)) == (num_leased, 3)


def test_open_evicts_but_never_what_it_has_just_leased() -> None:
    cache = make(4)
    cache.close(opened(cache, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    cache.close(opened(cache, [5, 6, 7, 8]), [5, 6, 7, 8], 4)
    assert cache.num_free == 0
    pages = opened(cache, [1, 2, 3, 4, 9], num_tokens=8)
    assert pages.pages[:2] == [0, 1]
    assert sorted(pages.pages) == [0, 1, 2, 3]
    assert cache.num_available == 0


def test_an_open_that_fails_changes_nothing() -> None:
    cache = make(4)
    cache.close(opened(cache, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    running = opened(cache, [5, 6])
    assert cache.open([1, 2, 3, 4, 9], "", num_tokens=10) is None
    assert cache.open([1, 2, 3, 4, 9], "", num_tokens=8) is None  # two pages of the three available would be leased
    assert (cache.num_free, cache.num_cached, cache.num_evictable, cache.num_owned) == (1, 2, 2, 1)
    assert cache.open([1, 2, 3, 4, 9], "", num_tokens=6) is not None
    cache.discard(running)
    cache.check()


def test_open_counts_on_pages_that_another_sequence_pins() -> None:
    cache = make(4)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    running = opened(cache, tokens[:6])
    cache.commit(running, tokens, 6)
    assert cache.num_available == 1
    pages = opened(cache, tokens)  # four pages, three of them pinned already
    assert pages.pages == [0, 1, 2, 3]
    assert cache.open([9], "", num_tokens=1) is None


def test_open_does_not_count_on_evicting_what_it_would_lease() -> None:
    cache = make(6)
    cache.close(opened(cache, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    running = opened(cache, [7, 7, 8, 8, 9, 9])
    cache.commit(running, [7, 7, 8, 8, 9, 9], 6)
    assert (cache.num_free, cache.num_evictable, cache.num_cached) == (1, 2, 5)
    assert cache.open([1, 2, 3, 4, 5], "", num_tokens=8) is None  # lacks two: one is free, two it leases
    assert (cache.num_free, cache.num_evictable) == (1, 2)
    assert opened(cache, [1, 2, 3, 4, 5]).num_leased == 2


def test_extend_is_all_or_nothing() -> None:
    cache = make(4)
    pages = opened(cache, [1, 2], num_tokens=2)
    assert cache.extend(pages, 2)
    assert cache.extend(pages, 6)
    assert pages.pages == [0, 1, 2]
    assert not cache.extend(pages, 9)
    assert pages.pages == [0, 1, 2]
    assert cache.num_free == 1


def test_a_growing_sequence_gets_adjacent_pages_where_it_can() -> None:
    cache = make()
    first = opened(cache, [1, 2])
    second = opened(cache, [3, 4])
    cache.extend(second, 4)
    cache.extend(first, 4)
    cache.extend(second, 6)
    cache.extend(second, 8)
    assert first.pages == [0, 3]
    assert second.pages == [1, 2, 4, 5]


def test_commit_publishes_what_is_whole_and_known() -> None:
    cache = make()
    pages = opened(cache, [1, 2, 3, 4, 5], num_tokens=6)
    cache.commit(pages, [1, 2, 3, 4, 5], 3)
    assert (cache.num_cached, cache.num_evictable, pages.num_leased) == (1, 0, 1)
    assert cache.match_length([1, 2, 3, 4, 5], "") == 2
    cache.commit(pages, [1, 2, 3, 4, 5], 6)  # the sixth token is in flight: not known here
    assert (cache.num_cached, cache.num_owned) == (2, 1)
    with pytest.raises(InvariantError, match="8 tokens"):
        cache.commit(pages, list(range(8)), 8)
    cache.check()


def test_two_sequences_with_one_prompt_keep_one_copy() -> None:
    cache = make()
    tokens = [1, 2, 3, 4, 5]
    first, second = opened(cache, tokens), opened(cache, tokens)
    cache.commit(first, tokens, 4)
    cache.commit(second, tokens, 4)
    assert second.pages == [3, 4, 5]  # its page table at the worker stays valid
    assert (second.duplicates, second.num_leased, cache.num_cached) == ([3, 4], 2, 2)
    cache.check()
    cache.close(first, tokens, 5)
    assert cache.num_evictable == 0  # the second one's lease pins the copy
    cache.close(second, tokens, 5)
    assert (cache.num_cached, cache.num_evictable, cache.num_free) == (2, 2, 8)
    cache.check()


def test_discard_publishes_nothing() -> None:
    cache = make()
    cache.discard(opened(cache, [1, 2, 3, 4]))
    assert (cache.num_free, cache.num_cached, cache.num_owned) == (10, 0, 0)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_closed_handle_is_empty_and_refused(prefix_caching: bool) -> None:
    cache = make(prefix_caching=prefix_caching)
    pages = opened(cache, [1, 2, 3])
    cache.close(pages, [1, 2, 3], 3)
    assert (pages.pages, pages.num_leased, pages.owned_pages) == ([], 0, [])
    for misuse in (
        lambda: cache.close(pages, [1, 2, 3], 3),
        lambda: cache.discard(pages),
        lambda: cache.take_out(pages),
        lambda: cache.extend(pages, 2),
    ):
        with pytest.raises(InvariantError):
            misuse()
    cache.check()


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = make(prefix_caching=False)
    pages = opened(cache, [1, 2, 3, 4])
    cache.commit(pages, [1, 2, 3, 4], 4)
    cache.close(pages, [1, 2, 3, 4], 4)
    assert (cache.num_free, cache.num_cached) == (10, 0)
    assert cache.match_length([1, 2, 3, 4], "") == 0


def test_pages_taken_out_stay_out_until_they_are_given_back() -> None:
    cache = make(4)
    cache.close(opened(cache, [1, 2]), [1, 2], 2)
    pages = opened(cache, [1, 2, 3, 4], num_tokens=6)
    quarantined = cache.take_out(pages)
    assert quarantined == [1, 2]
    assert (cache.num_owned, cache.num_evictable, cache.num_free, cache.num_open) == (2, 1, 1, 0)
    assert cache.open([7, 8], "", num_tokens=6) is None
    cache.check()
    for wrong in ([3], [1, 1], [0]):
        with pytest.raises(InvariantError):
            cache.give_back(wrong)
    cache.give_back([2])
    cache.check()
    cache.give_back([1])
    assert cache.num_owned == 0
    with pytest.raises(InvariantError):
        cache.give_back([1])
    cache.check()


def test_flush_waits_for_open_sequences() -> None:
    cache = make()
    cache.close(opened(cache, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    pages = opened(cache, [9, 9])
    assert not cache.flush()
    assert cache.num_cached == 2
    cache.discard(pages)
    assert cache.flush()
    assert (cache.num_free, cache.num_cached) == (10, 0)


def test_what_is_outdated_is_not_found_nor_what_open_sequences_publish_later() -> None:
    cache = make()
    cache.close(opened(cache, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    pages = opened(cache, [1, 2, 3, 4, 5, 6])
    assert pages.num_leased == 2
    cache.outdate()
    cache.check()
    assert cache.match_length([1, 2, 3, 4, 5], "") == 0
    cache.commit(pages, [1, 2, 3, 4, 5, 6], 6)
    fresh = opened(cache, [1, 2, 3, 4, 5, 6])
    assert fresh.num_leased == 0
    cache.close(pages, [1, 2, 3, 4, 5, 6], 6)
    cache.check()
    cache.close(fresh, [1, 2, 3, 4, 5, 6], 6)
    assert cache.match_length([1, 2, 3, 4, 5, 6, 7], "") == 6
    cache.outdate()
    cache.check()
    assert (cache.num_cached, cache.num_free) == (0, 10)


def test_outdated_pages_of_open_sequences_are_evicted_in_their_turn() -> None:
    cache = make()
    pages = opened(cache, [1, 2, 3, 4, 5])
    cache.commit(pages, [1, 2, 3, 4, 5], 4)
    cache.outdate()
    cache.close(pages, [1, 2, 3, 4, 5], 4)
    assert cache.num_cached == 2
    whole = cache.open(list(range(20)), "", num_tokens=20)
    assert whole is not None and cache.num_cached == 0
    cache.check()


@pytest.mark.parametrize("attribute", ["pages", "duplicates", "num_leased"])
def test_check_notices_a_handle_changed_from_outside(attribute: str) -> None:
    cache = make()
    pages = opened(cache, [1, 2, 3, 4, 5])
    cache.commit(pages, [1, 2, 3, 4], 4)
    match attribute:
        case "pages":
            pages.pages.pop()
        case "duplicates":
            pages.duplicates.append(9)
        case _:
            pages.num_leased -= 1
    with pytest.raises(InvariantError):
        cache.check()


class KVCacheMachine(RuleBasedStateMachine):
    """Random lives in a small pool. A page remembers the prefix it was computed for, and a lease must match it."""

    NUM_PAGES = 12
    PAGE_SIZE = 2
    open_sequences = Bundle("open_sequences")
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    keys = st.sampled_from(["", "adapter"])

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(self.NUM_PAGES, self.PAGE_SIZE, prefix_caching=True)
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.quarantined: list[int] = []

    def compute(self, pages: SequencePages, token_ids: list[int], num_computed: int) -> None:
        """What a worker would do: write the sequence's own pages, never a leased one."""
        for index, page in enumerate(pages.pages[: num_computed // self.PAGE_SIZE]):
            prefix = (pages.cache_key, tuple(token_ids[: (index + 1) * self.PAGE_SIZE]))
            if index >= pages.num_leased:
                self.content[page] = prefix
            assert self.content[page] == prefix

    def books(self) -> tuple[int, int, int, int]:
        return (self.cache.num_free, self.cache.num_cached, self.cache.num_evictable, self.cache.num_owned)

    @rule(
        target=open_sequences,
        prompt=prompts,
        key=keys,
        num_more=st.integers(-4, 8),
        max_cached=st.none() | st.integers(0, 12),
    )
    def open(self, prompt: list[int], key: str, num_more: int, max_cached: int | None) -> object:
        num_tokens = max(1, len(prompt) + num_more)
        expected = self.cache.match_length(prompt, key)
        before = self.books()
        pages = self.cache.open(prompt, key, num_tokens=num_tokens, max_cached_tokens=max_cached)
        if pages is None:
            assert self.books() == before
            assert self.cache.num_available < self.cache.num_pages_for(num_tokens)
            return multiple()
        cached = pages.num_leased * self.PAGE_SIZE
        assert cached == (expected if max_cached is None else min(expected, max_cached // 2 * 2))
        assert cached < len(prompt)
        assert len(pages.pages) == max(pages.num_leased, self.cache.num_pages_for(num_tokens))
        self.compute(pages, prompt, cached)
        return (pages, prompt)

    @rule(sequence=open_sequences, num_more=st.integers(0, 6))
    def extend(self, sequence: tuple[SequencePages, list[int]], num_more: int) -> None:
        pages, _ = sequence
        before, had = self.books(), list(pages.pages)
        num_tokens = len(had) * self.PAGE_SIZE + num_more
        lacking = self.cache.num_pages_for(num_tokens) - len(had)
        is_possible = lacking <= self.cache.num_available
        assert self.cache.extend(pages, num_tokens) == is_possible
        assert pages.pages[: len(had)] == had
        assert len(pages.pages) == len(had) + (lacking if is_possible else 0)
        if not is_possible:
            assert self.books() == before

    @rule(sequence=open_sequences, tokens=st.lists(st.integers(0, 1), max_size=4))
    def decode(self, sequence: tuple[SequencePages, list[int]], tokens: list[int]) -> None:
        """Compute all that fits, sample more tokens, publish."""
        pages, token_ids = sequence
        num_computed = min(len(token_ids), len(pages.pages) * self.PAGE_SIZE)
        self.compute(pages, token_ids, num_computed)
        token_ids += tokens
        self.cache.commit(pages, token_ids, num_computed)

    @rule(sequence=consumes(open_sequences))
    def close(self, sequence: tuple[SequencePages, list[int]]) -> None:
        pages, token_ids = sequence
        num_computed = min(len(token_ids), len(pages.pages) * self.PAGE_SIZE)
        self.compute(pages, token_ids, num_computed)
        self.cache.close(pages, token_ids, num_computed)
        with pytest.raises(InvariantError):
            self.cache.close(pages, token_ids, num_computed)

    @rule(sequence=consumes(open_sequences))
    def discard(self, sequence: tuple[SequencePages, list[int]]) -> None:
        self.cache.discard(sequence[0])

    @rule(sequence=consumes(open_sequences))
    def take_out(self, sequence: tuple[SequencePages, list[int]]) -> None:
        self.quarantined += self.cache.take_out(sequence[0])

    @rule(count=st.integers(1, 5))
    def give_back(self, count: int) -> None:
        self.cache.give_back(self.quarantined[:count])
        del self.quarantined[:count]

    @rule()
    def flush(self) -> None:
        is_idle = self.cache.num_open == 0
        assert self.cache.flush() == is_idle
        if is_idle:
            assert self.cache.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.cache.check()
        assert self.cache.num_free + self.cache.num_cached + self.cache.num_owned == self.NUM_PAGES


KVCacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestKVCacheMachine = KVCacheMachine.TestCase
