from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from diptych.errors import InvariantError
from diptych.kv.prefix_cache import Lease, PrefixCache

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [1, 2, 3, 4, 9, 9, 9, 9]


def publish(cache: PrefixCache, token_ids: list[int], pages: list[int], cache_key: str = "") -> Lease:
    """Insert a sequence that computed everything itself; its lease stays alive."""
    lease = cache.match(token_ids[:0], cache_key)
    assert cache.insert(token_ids, pages, lease=lease).duplicates == []
    return lease


def test_match_finds_whole_pages_only() -> None:
    cache = PrefixCache(2)
    publish(cache, A, [10, 11, 12, 13])
    assert cache.match(A[:5], "").pages == [10, 11]
    assert cache.match(A, "").pages == [10, 11, 12, 13]
    assert cache.match([1, 2, 3, 9], "").pages == [10]
    assert cache.match([1], "").pages == []
    assert cache.match([9, 9], "").pages == []
    cache.check()


def test_cache_keys_share_nothing() -> None:
    cache = PrefixCache(2)
    publish(cache, A, [10, 11, 12, 13], cache_key="adapter")
    assert cache.find(A, "").num_pages == 0
    assert cache.find(A, "adapter").num_pages == 4


def test_find_pins_nothing_and_counts_what_is_unpinned() -> None:
    cache = PrefixCache(2)
    lease = publish(cache, A, [10, 11, 12, 13])
    cache.release(lease)
    short = cache.match(A[:4], "")
    found = cache.find(A, "")
    assert (found.num_pages, found.num_unpinned) == (4, 2)
    assert cache.find(A, "", max_pages=3).num_unpinned == 1
    assert cache.num_evictable == 2
    cache.release(short)
    assert cache.num_evictable == 4


def test_prompts_that_part_share_their_beginning() -> None:
    cache = PrefixCache(2)
    first = publish(cache, A, [10, 11, 12, 13])
    second = cache.match(B, "")
    assert second.pages == [10, 11]
    assert cache.insert(B, [22, 23], lease=second).taken == [22, 23]
    assert second.pages == [10, 11, 22, 23]
    assert first.pages == [10, 11, 12, 13]
    assert cache.num_pages == 6
    cache.check()


def test_duplicates_stay_with_the_caller_and_the_lease_pins_the_copy() -> None:
    cache = PrefixCache(2)
    second = cache.match(A, "")
    publish(cache, A[:4], [10, 11])
    inserted = cache.insert(A, [20, 21, 22, 23], lease=second)
    assert (inserted.duplicates, inserted.taken) == ([20, 21], [22, 23])
    assert second.pages == [10, 11, 22, 23]
    cache.check()


def test_a_growing_sequence_grows_its_leaf_until_someone_else_pins_it() -> None:
    cache = PrefixCache(2)
    lease = cache.match([], "")
    for page in range(3):
        cache.insert(A, [10 + page], lease=lease)
        cache.check()
    assert cache._num_nodes == 1
    other = cache.match(A[:6], "")
    cache.insert(A, [13], lease=lease)
    cache.check()
    assert (other.pages, lease.pages) == ([10, 11, 12], [10, 11, 12, 13])
    cache.release(lease)
    assert cache.num_evictable == 1


def test_a_page_that_is_not_full_is_refused() -> None:
    cache = PrefixCache(2)
    with pytest.raises(InvariantError, match="not full"):
        cache.insert([1, 2, 3], [10, 11], lease=cache.match([], ""))


def test_a_lease_is_released_once() -> None:
    cache = PrefixCache(2)
    lease = publish(cache, A, [10, 11, 12, 13])
    cache.release(lease)
    with pytest.raises(InvariantError):
        cache.release(lease)
    with pytest.raises(InvariantError):
        cache.insert(A, [14], lease=lease)


def test_eviction_takes_the_least_recently_used_leaf_from_its_end() -> None:
    cache = PrefixCache(2)
    first = publish(cache, A, [10, 11, 12, 13])
    second = cache.match(B, "")
    cache.insert(B, [22, 23], lease=second)
    other = publish(cache, [5, 5, 6, 6], [30, 31])
    for lease in (other, second, first):
        cache.release(lease)
    cache.release(cache.match(B, ""))  # used again
    assert cache.evict(1) == [31]
    assert cache.evict(2) == [30, 13]
    assert cache.find(A, "").num_pages == 3
    assert cache.evict(2) == [12, 23]
    assert sorted(cache.evict(9)) == [10, 11, 22]
    assert cache.num_pages == cache.num_evictable == 0
    assert cache._roots == {}
    cache.check()


def test_what_is_pinned_is_never_evicted() -> None:
    cache = PrefixCache(2)
    cache.release(publish(cache, A, [10, 11, 12, 13]))
    lease = cache.match(A[:4], "")
    assert cache.evict(9) == [12, 13]
    assert cache.evict(9) == []
    assert lease.pages == [10, 11]


def test_clear_under_a_lease_is_a_bug() -> None:
    cache = PrefixCache(2)
    lease = publish(cache, A, [10, 11, 12, 13])
    with pytest.raises(InvariantError):
        cache.clear()
    cache.release(lease)
    assert sorted(cache.clear()) == [10, 11, 12, 13]
    assert cache.find(A, "").num_pages == 0
    cache.check()


def test_the_eviction_queue_does_not_grow_with_use() -> None:
    cache = PrefixCache(2)
    cache.release(publish(cache, A, [10, 11, 12, 13]))
    for _ in range(1000):
        cache.release(cache.match(A, ""))
    assert len(cache._heap) < 100
    assert sorted(cache.evict(4)) == [10, 11, 12, 13]


def test_a_long_edge_is_split_at_the_right_page() -> None:
    cache = PrefixCache(2)
    tokens = list(range(200))
    publish(cache, tokens, list(range(100)))
    for num_common in range(1, 100):
        other = [*tokens[: 2 * num_common], 999, *tokens[2 * num_common + 1 :]]
        assert cache.find(other, "").num_pages == num_common


def test_check_notices_a_wrong_pin() -> None:
    cache = PrefixCache(2)
    lease = publish(cache, A, [10, 11, 12, 13])
    assert lease.node is not None
    lease.node.num_leases += 1
    with pytest.raises(InvariantError):
        cache.check()


Held = tuple[tuple[int, ...], str, Lease]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Against a dict from (cache key, prefix of whole pages) to the page that ends it, with the prefix's last use."""

    PAGE_SIZE = 2
    leases = Bundle("leases")
    prompts = st.lists(st.integers(0, 1), min_size=0, max_size=9).map(tuple)
    keys = st.sampled_from(["", "x"])

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(self.PAGE_SIZE)
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.last_used: dict[tuple[str, tuple[int, ...]], int] = {}
        self.live: list[Held] = []
        self.num_made = 0
        self.now = 0

    def prefixes(self, prompt: tuple[int, ...], key: str) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(self.PAGE_SIZE, len(prompt) + 1, self.PAGE_SIZE)
        return [(key, prompt[:end]) for end in ends]

    def cached(self, prompt: tuple[int, ...], key: str) -> list[tuple[str, tuple[int, ...]]]:
        return [prefix for prefix in self.prefixes(prompt, key) if prefix in self.pages]

    def use(self, prefixes: list[tuple[str, tuple[int, ...]]]) -> None:
        self.now += 1
        self.last_used.update(dict.fromkeys(prefixes, self.now))

    def pinned(self) -> set[tuple[str, tuple[int, ...]]]:
        return {
            prefix
            for prompt, key, lease in self.live
            for prefix in self.prefixes(prompt[: lease.num_pages * self.PAGE_SIZE], key)
        }

    @rule(target=leases, prompt=prompts, key=keys)
    def match(self, prompt: tuple[int, ...], key: str) -> Held:
        expected = self.cached(prompt, key)
        num_unpinned = len(set(expected) - self.pinned())
        assert self.cache.find(prompt, key)[3:] == (len(expected), num_unpinned)
        held = (prompt, key, self.cache.match(prompt, key))
        assert held[2].pages == [self.pages[prefix] for prefix in expected]
        self.use(expected)
        self.live.append(held)
        return held

    @rule(held=leases, count=st.integers(0, 5))
    def insert(self, held: Held, count: int) -> None:
        prompt, key, lease = held
        if held not in self.live:
            with pytest.raises(InvariantError):
                self.cache.insert(prompt, [], lease=lease)
            return
        prefixes = self.prefixes(prompt, key)[lease.num_pages :][:count]
        pages = list(range(self.num_made, self.num_made + len(prefixes)))
        self.num_made += len(prefixes)
        by_prefix = dict(zip(prefixes, pages, strict=True))
        inserted = self.cache.insert(prompt, pages, lease=lease)
        assert inserted.duplicates == [page for prefix, page in by_prefix.items() if prefix in self.pages]
        assert inserted.taken == [page for prefix, page in by_prefix.items() if prefix not in self.pages]
        self.pages = by_prefix | self.pages
        self.use(prefixes)
        assert lease.pages == [self.pages[prefix] for prefix in self.prefixes(prompt, key)[: lease.num_pages]]

    @rule(held=consumes(leases))
    def release(self, held: Held) -> None:
        prompt, key, lease = held
        self.use(self.prefixes(prompt[: lease.num_pages * self.PAGE_SIZE], key))
        self.cache.release(lease)
        self.live.remove(held)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        """Page by page the model evicts the least recently used unpinned prefix that no other extends."""
        expected: list[int] = []
        while len(expected) < count:
            inner = {(key, prompt[: -self.PAGE_SIZE]) for key, prompt in self.pages}
            leaves = self.pages.keys() - inner - self.pinned()
            if not leaves:
                break
            oldest = min(leaves, key=lambda leaf: (self.last_used[leaf], -len(leaf[1])))
            expected.append(self.pages.pop(oldest))
        evicted = self.cache.evict(count)
        assert set(evicted) == set(expected)
        assert len(evicted) == len(expected)

    @rule()
    def clear(self) -> None:
        if self.live:
            return
        assert sorted(self.cache.clear()) == sorted(self.pages.values())
        self.pages.clear()

    @invariant()
    def books_balance(self) -> None:
        self.cache.check()
        assert sorted(self.cache.cached_pages()) == sorted(self.pages.values())
        assert self.cache.num_evictable == len(self.pages.keys() - self.pinned())
        assert self.cache.num_leases == len(self.live)


PrefixCacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPrefixCacheMachine = PrefixCacheMachine.TestCase
