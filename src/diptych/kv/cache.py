"""The scheduler's one door to KV pages: sequences' pages, the prefix cache and the free pages, as one set of books.

Every page is at any time in exactly one place: free, in the prefix cache, owned by an open sequence, or taken out
(owned by a transfer). `check` proves it. A sequence is closed only when no step in flight touches its pages; that is
the scheduler's duty, and nothing here knows about steps, tensors or requests. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diptych.errors import InvariantError
from diptych.kv.allocator import PageAllocator
from diptych.kv.prefix_cache import Lease, PrefixCache


@dataclass(slots=True, eq=False)
class SequencePages:
    """The pages of one open sequence, in the order of its tokens. Read it; only `KVCache` changes it.

    pages: all of them. num_leased: the first so many are covered by `lease`: they belong to the prefix cache, except
    for `duplicates`, which the sequence computed while the cache got the same tokens from another one. It owns those
    and `pages[num_leased:]`. After close, discard or take_out everything is empty.
    """

    cache_key: str
    pages: list[int]
    num_leased: int
    lease: Lease
    duplicates: list[int] = field(default_factory=list)

    @property
    def owned_pages(self) -> list[int]:
        """The pages that are the sequence's own."""
        return self.duplicates + self.pages[self.num_leased :]


class KVCache:
    """Pages `0 .. num_pages - 1` of `page_size` tokens. One owner, one thread.

    prefix_caching: keep whole pages of sequences for prompts that begin alike; without it nothing is ever cached.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._allocator = PageAllocator(num_pages)
        self._prefix_cache = PrefixCache(page_size)
        self._open: set[SequencePages] = set()
        self._taken_out: set[int] = set()
        self._num_owned = 0
        self._epoch = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages in the prefix cache, pinned or not."""
        return self._prefix_cache.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages in the prefix cache that no open sequence uses."""
        return self._prefix_cache.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that open and extend can still give out: free and evictable ones."""
        return self._allocator.num_free + self._prefix_cache.num_evictable

    @property
    def num_owned(self) -> int:
        """Pages owned by open sequences or taken out."""
        return self._num_owned

    @property
    def num_taken_out(self) -> int:
        """Pages owned by transfers that were given up and may still write."""
        return len(self._taken_out)

    @property
    def num_open(self) -> int:
        """Sequences opened and not yet closed, discarded or taken out."""
        return len(self._open)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match_length(self, token_ids: Sequence[int], cache_key: str) -> int:
        """Tokens that `open` would find cached: whole pages, never all of `token_ids`. Pins nothing, is no use."""
        limit = self._most_cached_pages(len(token_ids), None)
        found = self._prefix_cache.find(token_ids, self._key_now(cache_key), max_pages=limit)
        return found.num_pages * self.page_size

    def open(
        self, token_ids: Sequence[int], cache_key: str, *, num_tokens: int, max_cached_tokens: int | None = None
    ) -> SequencePages | None:
        """Lease the longest cached prefix of `token_ids` and own pages beyond it, so that `num_tokens` tokens fit.

        max_cached_tokens: use no more of the cache (prompt logprobs need the tokens computed). The last of `token_ids`
        is always left to compute. Evicts as needed. Returns None, with nothing changed, if there are not enough pages.
        The cached tokens are `num_leased * page_size`, which may exceed num_tokens.
        """
        num_needed = self.num_pages_for(num_tokens)
        if num_needed > self.num_available + self.num_cached - self.num_evictable:
            return None  # not even if every pinned page were a hit: spares a waiting prompt the walk
        limit = self._most_cached_pages(len(token_ids), max_cached_tokens)
        found = self._prefix_cache.find(token_ids, self._key_now(cache_key), max_pages=limit)
        num_lacking = max(0, num_needed - found.num_pages)
        if num_lacking > self.num_available - found.num_unpinned:
            return None
        lease = self._prefix_cache.pin(found)
        pages = SequencePages(cache_key, lease.pages, found.num_pages, lease)
        self._open.add(pages)
        self._grow(pages, num_lacking)
        return pages

    def extend(self, pages: SequencePages, num_tokens: int) -> bool:
        """Append pages until `num_tokens` fit, evicting as needed; False, and nothing changed, if there are too few."""
        num_lacking = self.num_pages_for(num_tokens) - len(pages.pages)
        if num_lacking <= 0:
            return True
        self._require_open(pages)
        if num_lacking > self.num_available:
            return False
        self._grow(pages, num_lacking)
        return True

    def commit(self, pages: SequencePages, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish the whole pages among the first `num_computed` tokens; the sequence goes on, its lease covers them.

        token_ids: as far as the host knows them; pages with tokens beyond are left for later. Costs nothing when no
        further page is whole. num_computed may count steps in flight if whoever reads the pages runs in a later step.
        """
        num_whole = min(num_computed, len(token_ids)) // self.page_size
        if num_whole <= pages.num_leased or not self.prefix_caching:
            return
        self._require_open(pages)
        if num_whole > len(pages.pages):
            raise InvariantError(f"{num_computed} tokens are said to be computed in {len(pages.pages)} pages")
        fresh = pages.pages[pages.num_leased : num_whole]
        inserted = self._prefix_cache.insert(token_ids, fresh, lease=pages.lease)
        pages.duplicates += inserted.duplicates
        pages.num_leased = num_whole
        self._num_owned -= len(inserted.taken)

    def close(self, pages: SequencePages, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish what is whole and give everything back. Raises InvariantError if the sequence is not open."""
        self._require_open(pages)
        self.commit(pages, token_ids, num_computed)
        self.discard(pages)

    def discard(self, pages: SequencePages) -> None:
        """Give everything back and publish nothing further. Raises InvariantError if the sequence is not open."""
        owned = self._end(pages)
        self._allocator.free(owned)
        self._num_owned -= len(owned)

    def take_out(self, pages: SequencePages) -> list[int]:
        """End the sequence but keep its own pages from use: a peer may still write them. Its lease is released.

        Returns: the pages, owned by the caller (a transfer) until `give_back`.
        """
        owned = self._end(pages)
        self._taken_out.update(owned)
        return owned

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages that were taken out, all or some. Raises InvariantError, and frees none, for any other page."""
        returned = list(pages)
        if not self._taken_out.issuperset(returned):
            foreign = sorted(set(returned) - self._taken_out)
            raise InvariantError(f"pages {foreign} were given back without having been taken out")
        self._allocator.free(returned)
        self._taken_out.difference_update(returned)
        self._num_owned -= len(returned)

    def flush(self) -> bool:
        """Empty the prefix cache; False, with nothing changed, while a sequence is open.

        An open one would publish later what it computed before (with other weights, say).
        """
        if self._open:
            return False
        self._allocator.free(self._prefix_cache.clear())
        return True

    def outdate(self) -> None:
        """Nothing computed so far is found any more: it was computed with other weights, say.

        Open sequences keep their pages; what they publish later is not found either, as it follows on from those.
        """
        self._epoch += 1
        self._allocator.free(self._prefix_cache.evict(self.num_evictable))

    def _key_now(self, cache_key: str) -> str:
        """The cache key of sequences that are opened now."""
        return f"{self._epoch}\n{cache_key}" if self._epoch else cache_key

    def check(self) -> None:
        """Raise InvariantError unless free + cached + owned is every page, each in one place; walks everything."""
        self._allocator.check()
        self._prefix_cache.check()
        owned = [page for pages in self._open for page in pages.owned_pages]
        owned += self._taken_out
        if len(owned) != self._num_owned:
            raise InvariantError(f"{self._num_owned} owned pages are counted, {len(owned)} are held")
        places = [*self._allocator.free_pages(), *self._prefix_cache.cached_pages(), *owned]
        if len(places) != self.num_pages or set(places) != set(range(self.num_pages)):
            books = f"{self.num_free} free + {self.num_cached} cached + {self.num_owned} owned"
            raise InvariantError(f"{books} pages are not the {self.num_pages} of the pool, each in one place")
        if self._prefix_cache.num_leases != len(self._open):
            raise InvariantError(f"{self._prefix_cache.num_leases} leases for {len(self._open)} open sequences")
        for pages in self._open:
            self._check_lease(pages)

    def _check_lease(self, pages: SequencePages) -> None:
        """A sequence reads its leased pages from the cache, except where it kept its own duplicate."""
        cached = pages.lease.pages
        if len(cached) != pages.num_leased:
            raise InvariantError(f"a sequence counts {pages.num_leased} leased pages, its lease {len(cached)}")
        own = [page for page, theirs in zip(pages.pages, cached, strict=False) if page != theirs]
        if own != pages.duplicates:
            raise InvariantError(f"pages {own} are not what the lease covers, {pages.duplicates} are its duplicates")

    def _most_cached_pages(self, num_tokens: int, max_cached_tokens: int | None) -> int:
        """Pages that may come from the cache: the last token's logits are wanted, so it is always computed."""
        most = num_tokens - 1 if max_cached_tokens is None else min(num_tokens - 1, max_cached_tokens)
        return max(0, most) // self.page_size

    def _grow(self, pages: SequencePages, count: int) -> None:
        """Append `count` owned pages, which are known to be available, adjacent to the last one where possible."""
        lacking = count - self._allocator.num_free
        if lacking > 0:
            self._allocator.free(self._prefix_cache.evict(lacking))
        fresh = self._allocator.allocate(count, after=pages.pages[-1] if pages.pages else None)
        if fresh is None:
            raise InvariantError(f"{count} pages were available, {self._allocator.num_free} are free after eviction")
        pages.pages += fresh
        self._num_owned += count

    def _end(self, pages: SequencePages) -> list[int]:
        """Release the lease and empty the handle; returns the pages it owned, which the caller must place."""
        self._require_open(pages)
        self._open.remove(pages)
        self._prefix_cache.release(pages.lease)
        owned = pages.owned_pages
        pages.pages = []
        pages.duplicates = []
        pages.num_leased = 0
        return owned

    def _require_open(self, pages: SequencePages) -> None:
        if pages not in self._open:
            raise InvariantError("the pages of a sequence that is not open were used; it was closed before")
