"""Which whole pages are kept for prompts that begin alike: a radix tree per cache key, leases, and LRU eviction.

An edge holds a run of pages and their tokens; it is split where two prompts part. A lease pins the path from the root
to its last page; what no lease pins is evictable, leaves first, least recently used first. Owns the pages that are in
the tree; knows neither the allocator nor sequences. Never imports torch.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.errors import InvariantError


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree, and what hangs below it; the root of a cache key has no pages.

    tokens: int32, page_size for each of `pages`. children: by the bytes of their first page's tokens. parent: None for
    a root and for a node that left the tree. num_leases: leases that end here or below. last_used: a tick, not a time.
    cache_key: set in a root.
    """

    tokens: array[int]
    pages: list[int]
    parent: Node | None
    num_leases: int = 0
    last_used: int = 0
    cache_key: str = ""
    children: dict[bytes, Node] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Lease:
    """Pins the first `num_pages` pages of a prompt in the cache until `PrefixCache.release`.

    node: where the pinned path ends, always at the end of an edge; None while there are no pages.
    """

    cache_key: str
    num_pages: int
    node: Node | None

    @property
    def pages(self) -> list[int]:
        """The pinned pages, first to last, as the cache holds them."""
        runs: list[list[int]] = []
        node = self.node
        while node is not None:
            runs.append(node.pages)
            node = node.parent
        return [page for run in reversed(runs) for page in run]


class Found(NamedTuple):
    """A cached prefix that is not pinned yet: `num_pages` pages, the last `num_inside` of them in `node`.

    num_unpinned: how many of the pages are evictable until they are pinned. Valid until the cache changes.
    """

    cache_key: str
    node: Node | None
    num_inside: int
    num_pages: int
    num_unpinned: int


class Inserted(NamedTuple):
    """What became of pages offered to the cache: taken over by it, or left to the caller because it has such pages."""

    taken: list[int]
    duplicates: list[int]


class PrefixCache:
    """Radix tree over whole pages. One owner, one thread.

    Token ids are those of a vocabulary: 0 .. 2**31 - 1. Costs are linear in the tokens that match or are inserted, not
    in the prompt and not in the tree.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._roots: dict[str, Node] = {}
        self._leases: set[Lease] = set()
        self._num_pages = 0
        self._num_evictable = 0
        self._num_nodes = 0
        self._tick = 0
        self._num_pushes = 0
        # (last_used, push number, node) of every unpinned leaf. An entry goes stale when its node is used again.
        self._heap: list[tuple[int, int, Node]] = []

    @property
    def num_pages(self) -> int:
        """Pages in the cache."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages in the cache that no lease pins."""
        return self._num_evictable

    @property
    def num_leases(self) -> int:
        """Leases not yet released, those of zero pages included."""
        return len(self._leases)

    def find(self, token_ids: Sequence[int], cache_key: str, *, max_pages: int | None = None) -> Found:
        """The longest cached prefix, whole pages and at most `max_pages`; pins nothing and counts as no use."""
        limit = len(token_ids) // self.page_size
        if max_pages is not None:
            limit = min(limit, max_pages)
        root = self._roots.get(cache_key)
        if root is None or limit <= 0:
            return Found(cache_key, None, 0, 0, 0)
        node, num_inside, depth = self._walk(token_ids, root, depth=0, limit=limit)
        num_unpinned = 0 if node.num_leases else num_inside
        above = node.parent
        while above is not None:
            num_unpinned += 0 if above.num_leases else len(above.pages)
            above = above.parent
        return Found(cache_key, node if depth else None, num_inside, depth, num_unpinned)

    def pin(self, found: Found) -> Lease:
        """Pin what `find` has just found."""
        node = found.node
        if node is not None:
            if found.num_inside < len(node.pages):
                node = self._split(node, found.num_inside)
            self._pin_path(node, above=None)
        lease = Lease(found.cache_key, found.num_pages, node)
        self._leases.add(lease)
        return lease

    def match(self, token_ids: Sequence[int], cache_key: str) -> Lease:
        """The longest cached prefix, whole pages (perhaps none), pinned until `release`."""
        return self.pin(self.find(token_ids, cache_key))

    def insert(self, token_ids: Sequence[int], pages: list[int], *, lease: Lease) -> Inserted:
        """Publish the whole pages that follow a lease's, and let the lease cover them.

        Args: token_ids: from the sequence's start. pages: hold the tokens from `lease.num_pages * page_size` on, full.
        Returns: the pages taken over, pinned by the lease, and before them the duplicates: pages that the cache already
        had in another copy (which the lease now pins) and that stay the caller's.
        """
        self._require(lease)
        start = lease.num_pages
        limit = start + len(pages)
        if limit * self.page_size > len(token_ids):
            raise InvariantError(f"{limit} pages of {self.page_size} tokens are not full with {len(token_ids)} tokens")
        if not pages:
            return Inserted([], [])
        top = lease.node if lease.node is not None else self._root(lease.cache_key)
        node, num_inside, depth = self._walk(token_ids, top, depth=start, limit=limit)
        if num_inside < len(node.pages):
            node = self._split(node, num_inside)
        duplicates, taken = pages[: depth - start], pages[depth - start :]
        if taken:
            node = self._append(node, self._encode(token_ids, depth, limit), taken, lease=lease)
        self._pin_path(node, above=lease.node)
        lease.node = node
        lease.num_pages = limit
        return Inserted(taken, duplicates)

    def release(self, lease: Lease) -> None:
        """Unpin. Raises InvariantError if it was released before."""
        self._require(lease)
        self._leases.remove(lease)
        self._tick += 1
        node = lease.node
        while node is not None:
            node.last_used = self._tick
            node.num_leases -= 1
            if not node.num_leases:
                self._num_evictable += len(node.pages)
            node = node.parent
        if lease.node is not None:
            self._push_if_evictable(lease.node)
        lease.node = None

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` pages that no lease pins: the least recently used leaves, each from its end."""
        pages: list[int] = []
        while len(pages) < count and self._heap:
            last_used, _, node = self._heap[0]
            if not _is_current(node, last_used):
                heapq.heappop(self._heap)
                continue
            num_kept = len(node.pages) - (count - len(pages))
            if num_kept > 0:  # the entry stays: the node is a leaf still
                pages += node.pages[num_kept:]
                del node.pages[num_kept:], node.tokens[num_kept * self.page_size :]
            else:
                heapq.heappop(self._heap)
                pages += node.pages
                self._remove(node)
        self._num_pages -= len(pages)
        self._num_evictable -= len(pages)
        return pages

    def clear(self) -> list[int]:
        """Every page, removed from the cache. Raises InvariantError while a lease is alive."""
        if self._leases:
            raise InvariantError(f"the prefix cache was cleared under {len(self._leases)} leases; release them first")
        pages = [page for node in self._nodes() for page in node.pages]
        self._roots.clear()
        self._heap.clear()
        self._num_pages = self._num_evictable = self._num_nodes = 0
        return pages

    def cached_pages(self) -> Iterator[int]:
        """Every page in the cache, in no order; for checks."""
        for node in self._nodes():
            yield from node.pages

    def check(self) -> None:
        """Raise InvariantError unless the tree, the pins and the counters agree; walks everything."""
        pins: dict[Node, int] = {}
        for lease in self._leases:
            if len(lease.pages) != lease.num_pages:
                raise InvariantError(f"a lease of {lease.num_pages} pages pins {len(lease.pages)}")
            node = lease.node
            while node is not None:
                pins[node] = pins.get(node, 0) + 1
                node = node.parent
        nodes = list(self._nodes())
        if len(nodes) != self._num_nodes:
            raise InvariantError(f"{self._num_nodes} nodes are counted, the tree has {len(nodes)}")
        if not pins.keys() <= {*nodes, *self._roots.values()}:
            raise InvariantError("a lease pins a node that left the tree")
        if not all(root.children for root in self._roots.values()):
            raise InvariantError("an empty root was kept")
        queued = {(node, last_used) for last_used, _, node in self._heap}
        for node in nodes:
            self._check_node(node, num_leases=pins.get(node, 0))
            if not node.num_leases and not node.children and (node, node.last_used) not in queued:
                raise InvariantError("an unpinned leaf is not queued for eviction")
        if sum(len(node.pages) for node in nodes) != self._num_pages:
            raise InvariantError(f"{self._num_pages} cached pages are counted, the tree disagrees")
        if sum(len(node.pages) for node in nodes if not node.num_leases) != self._num_evictable:
            raise InvariantError(f"{self._num_evictable} evictable pages are counted, the tree disagrees")

    def _check_node(self, node: Node, *, num_leases: int) -> None:
        if node.num_leases != num_leases:
            raise InvariantError(f"a node counts {node.num_leases} leases, {num_leases} pin it")
        if not node.pages or len(node.tokens) != len(node.pages) * self.page_size:
            raise InvariantError(f"a node of {len(node.pages)} pages has {len(node.tokens)} tokens")
        for key, child in node.children.items():
            if child.parent is not node or key != self._first_page(child.tokens):
                raise InvariantError("a child is filed under the wrong parent or the wrong page")

    def _walk(self, token_ids: Sequence[int], node: Node, *, depth: int, limit: int) -> tuple[Node, int, int]:
        """Follow `token_ids` down from `node`, which ends at page `depth`, to page `limit` at most.

        Returns: the last node reached, how many of its pages match, and how many pages match in all.
        """
        while depth < limit:
            child = node.children.get(self._encode(token_ids, depth, depth + 1).tobytes())
            if child is None:
                break
            tokens = self._encode(token_ids, depth, min(depth + len(child.pages), limit))
            num_common = self._num_common_pages(tokens, child.tokens)
            depth += num_common
            if num_common < len(child.pages):
                return child, num_common, depth
            node = child
        return node, len(node.pages), depth

    def _num_common_pages(self, tokens: array[int], cached: array[int]) -> int:
        """Leading whole pages in which `tokens`, the shorter one, equals `cached`; the first page is known to."""
        same, different = 1, len(tokens) // self.page_size + 1
        probe = different - 1  # almost always all are equal
        while different - same > 1:
            start, end = same * self.page_size, probe * self.page_size
            if tokens[start:end] == cached[start:end]:
                same = probe
            else:
                different = probe
            probe = (same + different) // 2
        return same

    def _encode(self, token_ids: Sequence[int], start: int, end: int) -> array[int]:
        """Tokens of pages `start .. end - 1` in a form that compares and hashes at memory speed."""
        return array("i", token_ids[start * self.page_size : end * self.page_size])

    def _first_page(self, tokens: array[int]) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _root(self, cache_key: str) -> Node:
        root = self._roots.get(cache_key)
        if root is None:
            root = self._roots[cache_key] = Node(array("i"), [], None, cache_key=cache_key)
        return root

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut an edge after `num_pages`; returns the new upper part. Leases that end at the edge's end still do."""
        cut = num_pages * self.page_size
        upper = Node(node.tokens[:cut], node.pages[:num_pages], node.parent, node.num_leases, node.last_used)
        if node.parent is None:
            raise InvariantError("a root of the prefix cache was split")
        node.parent.children[self._first_page(upper.tokens)] = upper
        del node.tokens[:cut], node.pages[:num_pages]
        node.parent = upper
        upper.children[self._first_page(node.tokens)] = node
        self._num_nodes += 1
        return upper

    def _append(self, node: Node, tokens: array[int], pages: list[int], *, lease: Lease) -> Node:
        """Add pages below `node`; returns the node that ends with them.

        A sequence that publishes page after page grows its own leaf: a long one must not become a chain of nodes.
        """
        self._num_pages += len(pages)
        is_ours_alone = node.num_leases == (1 if node is lease.node else 0)
        if node.pages and not node.children and is_ours_alone:
            node.tokens += tokens
            node.pages += pages
        else:
            parent, node = node, Node(tokens, list(pages), node)
            parent.children[self._first_page(tokens)] = node
            self._num_nodes += 1
        if not node.num_leases:
            self._num_evictable += len(pages)
        return node

    def _pin_path(self, node: Node, *, above: Node | None) -> None:
        """Pin from `node` up to, but without, `above`: that one the lease pins already."""
        self._tick += 1
        step: Node | None = node
        while step is not None and step is not above:
            if not step.num_leases:
                self._num_evictable -= len(step.pages)
            step.num_leases += 1
            step.last_used = self._tick
            step = step.parent

    def _push_if_evictable(self, node: Node) -> None:
        if node.num_leases or node.children:
            return
        if len(self._heap) > 2 * self._num_nodes + 64:
            self._heap = [entry for entry in self._heap if _is_current(entry[2], entry[0])]
            heapq.heapify(self._heap)
        self._num_pushes += 1
        heapq.heappush(self._heap, (node.last_used, self._num_pushes, node))

    def _remove(self, node: Node) -> None:
        """Take an unpinned leaf out of the tree; its parent may become one, and an empty root goes."""
        parent = node.parent
        if parent is None:
            raise InvariantError("a root of the prefix cache was evicted")
        del parent.children[self._first_page(node.tokens)]
        node.parent = None
        self._num_nodes -= 1
        if parent.pages:
            self._push_if_evictable(parent)
        elif not parent.children:
            del self._roots[parent.cache_key]

    def _require(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise InvariantError(f"a lease of {lease.num_pages} pages was used after its release")

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _is_current(node: Node, last_used: int) -> bool:
    """Whether a heap entry still describes an unpinned leaf of the tree."""
    return node.last_used == last_used and not node.num_leases and not node.children and node.parent is not None
