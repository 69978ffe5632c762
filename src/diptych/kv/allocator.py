"""Which pages of the pool are free, as runs of adjacent pages. Knows no sequences and no tokens. Never imports torch.

A transfer costs per run and not per byte, so an allocation takes the smallest run that holds all of it, and splits over
several only when none does: then the longest first, which gives the fewest.

    runs     start -> end and end -> start of every free run: joining neighbours is two lookups
    buckets  size -> starts of the free runs of that size
    sizes    the sizes that occur, ascending; n pages have at most sqrt(2n) of them, so a sorted list is enough
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from diptych.errors import InvariantError

FREE = 0
TAKEN = 1


class PageAllocator:
    """Pages `0 .. num_pages - 1`, all free at first. One owner, one thread."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_free = 0
        self._state = bytearray([TAKEN]) * num_pages
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._buckets: dict[int, dict[int, None]] = {}  # a dict as a set whose popitem() is the last one added
        self._sizes: list[int] = []
        if num_pages:
            self._release_run(0, num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return self._num_free

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` pages in ascending order and few runs; None, and nothing taken, if not enough are free.

        after: a page that the first one should be adjacent to (the sequence's last), if that is free.
        """
        if count > self._num_free:
            return None
        if count <= 0:
            return []
        if after is not None and after + 1 in self._end_of:
            return self._take_after(after + 1, count)
        return self._take_best(count)

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back, in any order. Raises InvariantError, and frees none, if one is free already or foreign."""
        runs = list(runs_of(sorted(pages)))
        for start, end in runs:
            if start < 0 or end > self.num_pages:
                raise InvariantError(f"freed pages {start}..{end - 1}, the pool has 0..{self.num_pages - 1}")
            first_free = self._state.find(FREE, start, end)
            if first_free >= 0:
                raise InvariantError(f"page {first_free} was freed twice")
        for start, end in runs:
            self._release_run(start, end)

    def free_pages(self) -> Iterator[int]:
        """Every free page, in no order; for checks."""
        for start, end in self._end_of.items():
            yield from range(start, end)

    def check(self) -> None:
        """Raise InvariantError unless the books agree with each other; walks everything."""
        if sum(end - start for start, end in self._end_of.items()) != self._num_free:
            raise InvariantError(f"{self._num_free} pages should be free, the runs say otherwise: {self._end_of}")
        if self._state.count(FREE) != self._num_free or any(self._state[page] != FREE for page in self.free_pages()):
            raise InvariantError("a page is marked free outside a free run, or taken inside one")
        if {end: start for start, end in self._end_of.items()} != self._start_of or any(
            end in self._end_of for end in self._start_of
        ):
            raise InvariantError(f"free runs are not maximal or their ends disagree: {self._end_of}, {self._start_of}")
        by_size = sorted((size, start) for size, bucket in self._buckets.items() for start in bucket)
        if by_size != sorted((end - start, start) for start, end in self._end_of.items()):
            raise InvariantError(f"free runs by size {by_size} disagree with the runs {self._end_of}")
        if self._sizes != sorted(self._buckets) or not all(self._buckets.values()):
            raise InvariantError(f"sizes {self._sizes} disagree with the buckets {sorted(self._buckets)}")

    def _take_after(self, start: int, count: int) -> list[int]:
        """Take from the free run that begins at `start`, and what it lacks where that fits best."""
        end = self._end_of[start]
        self._remove_run(start, end)
        length = end - start
        if length >= count:
            return self._split(start, end, count)
        return sorted(self._split(start, end, length) + self._take_best(count - length))

    def _take_best(self, count: int) -> list[int]:
        """Take `count` pages, which are known to be free, from the fewest runs."""
        pages: list[int] = []
        while count > (longest := self._sizes[-1]):
            start = self._pop_run(longest)
            pages += self._split(start, start + longest, longest)
            count -= longest
        size = self._sizes[bisect_left(self._sizes, count)]
        start = self._pop_run(size)
        taken = self._split(start, start + size, count)
        return sorted(pages + taken) if pages else taken

    def _split(self, start: int, end: int, count: int) -> list[int]:
        """Take the first `count` pages of a run that is off the books, and put the rest back on them."""
        cut = start + count
        if cut < end:
            self._add_run(cut, end)
        self._num_free -= count
        if count == 1:
            self._state[start] = TAKEN
            return [start]
        self._state[start:cut] = bytes([TAKEN]) * count
        return list(range(start, cut))

    def _release_run(self, start: int, end: int) -> None:
        """Mark taken pages free and join them with the free runs on either side."""
        self._num_free += end - start
        self._state[start:end] = bytes(end - start)  # zeros: FREE
        before = self._start_of.get(start)
        if before is not None:
            self._remove_run(before, start)
            start = before
        after = self._end_of.get(end)
        if after is not None:
            self._remove_run(end, after)
            end = after
        self._add_run(start, end)

    def _add_run(self, start: int, end: int) -> None:
        size = end - start
        self._end_of[start] = end
        self._start_of[end] = start
        bucket = self._buckets.get(size)
        if bucket is None:
            self._buckets[size] = {start: None}
            self._sizes.insert(bisect_left(self._sizes, size), size)
        else:
            bucket[start] = None

    def _remove_run(self, start: int, end: int) -> None:
        del self._end_of[start]
        del self._start_of[end]
        size = end - start
        bucket = self._buckets[size]
        del bucket[start]
        if not bucket:
            self._drop_size(size)

    def _pop_run(self, size: int) -> int:
        """Take the run of `size` that was freed last off the books; its start.

        popitem() and not the last key: a dict skips deleted entries at its end again and again until it is resized.
        """
        bucket = self._buckets[size]
        start, _ = bucket.popitem()
        if not bucket:
            self._drop_size(size)
        del self._end_of[start]
        del self._start_of[start + size]
        return start

    def _drop_size(self, size: int) -> None:
        del self._buckets[size]
        del self._sizes[bisect_left(self._sizes, size)]


def runs_of(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs (start, end) of adjacent pages in an ascending list. Raises InvariantError if a page is there twice."""
    if not pages:
        return
    start = previous = pages[0]
    for page in pages[1:]:
        if page != previous + 1:
            if page == previous:
                raise InvariantError(f"page {page} is twice in one list of pages")
            yield start, previous + 1
            start = page
        previous = page
    yield start, previous + 1
