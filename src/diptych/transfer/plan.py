"""Which bytes go where: a pure function of two layouts and two page lists. No sockets, no tensors, no NIXL.

A plan is (page template) x (page pairs). The template depends on two ranks' layouts alone and is built once per pair of
ranks; per request only array arithmetic runs.

Pages of unequal size are cut at every border of either side into *cells*, stretches of tokens that lie in one page on
both; the cells repeat after the least common multiple of the two sizes:

    source pages of 16       |       0       |       1       |       2       |
    destination pages of 24  |           0           |           1           |
    cells                    |       0       |   1   |   2   |       3       |

What is written: whole cells. The last one may be computed in part; its remaining bytes are copied as they are, into a
page that nobody reads beyond the computed tokens. So equal pages are always copied whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from diptych.errors import ConfigError, InvariantError, PeerIncompatible
from diptych.kv.layout import KVLayout, stage_layers

Int64s = NDArray[np.int64]

# Bound on a page template: what a peer says of its pages must not make us compute for seconds.
MAX_GROUP_TOKENS = 8192


class PageOrder(StrEnum):
    """How a pool is laid out in memory.

    PAGE_MAJOR: one region; a page is contiguous over all layers, K and V (ours). LAYER_MAJOR: 2 x num_layers regions, K
    of every layer, then V of every layer, each `[num_pages, page_size, num_kv_heads, head_dim]` (the base format's).
    """

    PAGE_MAJOR = "page-major"
    LAYER_MAJOR = "layer-major"


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The runs of bytes that one stretch of tokens needs; `first_token` counts from the start of the group of pages.

    src_offset, dst_offset: bytes from the page's start (LAYER_MAJOR: from the item's); dst_region: index of the region.
    """

    first_token: int
    num_tokens: int
    src_offset: Int64s
    dst_region: Int64s
    dst_offset: Int64s
    nbytes: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class PageTemplate:
    """What the rank of `src` writes into the rank of `dst`; no cells if they share nothing.

    group_tokens: tokens after which the cells repeat.
    """

    src: KVLayout
    dst: KVLayout
    dst_order: PageOrder
    group_tokens: int
    cells: tuple[Cell, ...]

    @property
    def num_runs(self) -> int:
        """Descriptors for one group of pages, before adjacent pages are merged."""
        return sum(len(cell.nbytes) for cell in self.cells)

    @property
    def num_dst_regions(self) -> int:
        """Base addresses that the destination must have named."""
        return 1 if self.dst_order is PageOrder.PAGE_MAJOR else len(self.dst.parts) * self.dst.num_layers

    @property
    def dst_stride(self) -> int:
        """Bytes from one page of the destination to the next, within a region."""
        if self.dst_order is PageOrder.PAGE_MAJOR:
            return self.dst.page_nbytes
        return self.dst.page_size * self.dst.row_nbytes

    def floor(self, num_tokens: int) -> int:
        """The last border of a cell within `num_tokens`: how far a chunk can be sent before more is computed."""
        return max(num_tokens // size * size for size in (self.src.page_size, self.dst.page_size))


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Copies to make: int64 arrays of equal length. src, dst: addresses; nbytes: lengths."""

    src: Int64s
    dst: Int64s
    nbytes: Int64s

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_nbytes(self) -> int:
        """Bytes that move."""
        return int(self.nbytes.sum())

    def src_rows(self, device: int) -> NDArray[np.uint64]:
        """uint64 [num, 3]: address, length, device; as a transfer backend takes it."""
        return _rows(self.src, self.nbytes, device)

    def dst_rows(self, device: int) -> NDArray[np.uint64]:
        """The same for the destination."""
        return _rows(self.dst, self.nbytes, device)


def page_template(src: KVLayout, dst: KVLayout, *, dst_order: PageOrder = PageOrder.PAGE_MAJOR) -> PageTemplate:
    """The runs of bytes that the rank of `src` must write into pages of `dst`, for any sharding and page sizes.

    Runs that are adjacent on both sides are joined. Raises PeerIncompatible, naming both values, if dtype or head_dim
    differ or the page sizes have too large a common multiple.
    """
    for name, ours, theirs in (
        ("dtype", src.dtype, dst.dtype),
        ("head_dim", src.head_dim, dst.head_dim),
        ("is_latent", src.is_latent, dst.is_latent),
    ):
        if ours != theirs:
            raise PeerIncompatible(
                f"KV cannot be converted: {name} is {ours} at the source and {theirs} at the destination"
            )
    group_tokens = math.lcm(src.page_size, dst.page_size)
    if group_tokens > MAX_GROUP_TOKENS:
        raise PeerIncompatible(
            f"KV cannot be converted: page_size is {src.page_size} at the source and {dst.page_size} at the"
            f" destination, whose pages begin together only every {group_tokens} tokens; {MAX_GROUP_TOKENS} at most"
        )
    borders = sorted({*range(0, group_tokens + 1, src.page_size), *range(0, group_tokens, dst.page_size)})
    template = PageTemplate(src, dst, dst_order, group_tokens, ())
    if not shared_cells(src, dst):
        return template
    cells = tuple(_cell(template, first, end - first) for first, end in pairwise(borders))
    return PageTemplate(src, dst, dst_order, group_tokens, cells)


def plan(
    template: PageTemplate,
    src_pages: Int64s,
    *,
    dst_pages: Int64s,
    src_base: int,
    dst_bases: Sequence[int],
    tokens: range | None = None,
    src_first_token: int = 0,
    dst_first_token: int = 0,
) -> Descriptors:
    """Descriptors that copy `tokens` of one sequence, adjacent pages joined where whole pages are copied.

    Args: src_pages, dst_pages: int64, the pages of consecutive tokens from src_first_token and dst_first_token on, each
    a multiple of its page size (so a prefix that the destination holds is left out of dst_pages). src_base: address of
    the source's page 0. dst_bases: the destination's base addresses, `template.num_dst_regions` of them. tokens:
    half-open, begins at a border of a cell (see `PageTemplate.floor`); its end is rounded up to one; None is all that
    both lists hold. Raises InvariantError for a window off the borders or outside the pages: callers check what peers
    send first.
    """
    if len(dst_bases) != template.num_dst_regions:
        raise InvariantError(f"{template.num_dst_regions} base addresses needed, the destination has {len(dst_bases)}")
    src_span = _span(src_pages, src_first_token, template.src.page_size)
    dst_span = _span(dst_pages, dst_first_token, template.dst.page_size)
    if tokens is None:
        tokens = range(max(src_span.start, dst_span.start), min(src_span.stop, dst_span.stop))
    _check_window(template, tokens, src_span, dst_span)
    bases = np.array(dst_bases, dtype=np.int64)
    parts = []
    for cell in template.cells:
        firsts = _first_tokens(cell, tokens, template.group_tokens)
        src_page = src_pages[(firsts - src_first_token) // template.src.page_size]
        dst_page = dst_pages[(firsts - dst_first_token) // template.dst.page_size]
        src = (src_base + src_page * template.src.page_nbytes)[:, None] + cell.src_offset
        dst = (dst_page * template.dst_stride)[:, None] + (bases[cell.dst_region] + cell.dst_offset)
        parts.append((src.ravel(), dst.ravel(), np.tile(cell.nbytes, len(firsts))))
    if not parts:
        return Descriptors(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    if len(parts) > 1:
        return Descriptors(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return _merged(*parts[0]) if template.num_runs == 1 else Descriptors(*parts[0])


def shared_cells(src: KVLayout, dst: KVLayout) -> int:
    """How many (layer, KV head) pairs both ranks hold."""
    return len(overlap(src.layers, dst.layers)) * len(overlap(src.kv_heads, dst.kv_heads))


def overlap(a: range, b: range) -> range:
    """What two ranges of step 1 have in common."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def shards(full: KVLayout, *, tp_size: int, pp_size: int) -> list[KVLayout]:
    """The layouts of all ranks of an engine, rank = pp_rank * tp_size + tp_rank.

    full: the layout of one rank that held everything. More ranks than KV heads replicate them. Raises ConfigError if
    the heads or layers cannot be dealt out.
    """
    heads, layers = full.num_kv_heads, full.num_layers
    if max(heads, tp_size) % min(heads, tp_size):
        raise ConfigError(f"{heads} KV heads cannot be dealt to tp_size {tp_size}: one must divide the other")
    width = max(1, heads // tp_size)
    return [
        KVLayout(
            layers=stage_layers(layers, stage, pp_size),
            kv_heads=range(rank * heads // tp_size, rank * heads // tp_size + width),
            head_dim=full.head_dim,
            page_size=full.page_size,
            dtype=full.dtype,
            is_latent=full.is_latent,
        )
        for stage in range(pp_size)
        for rank in range(tp_size)
    ]


def writers(dst: KVLayout, dst_rank: int, srcs: Sequence[KVLayout]) -> frozenset[int]:
    """Ranks of `srcs` that write to `dst`: one for each distinct shard; replicas are spread over the destination ranks.

    Raises PeerIncompatible if together they do not hold every byte of `dst` exactly once.
    """
    replicas: dict[tuple[range, range], list[int]] = {}
    for rank, src in enumerate(srcs):
        if shared_cells(src, dst):
            replicas.setdefault((src.layers, src.kv_heads), []).append(rank)
    chosen = frozenset(ranks[dst_rank % len(ranks)] for ranks in replicas.values())
    held, needed = sum(shared_cells(srcs[rank], dst) for rank in chosen), dst.num_layers * dst.num_kv_heads
    if held != needed:
        raise PeerIncompatible(
            f"the {len(srcs)} ranks of the source hold {held} of the {needed} (layer, KV head) pairs of the "
            f"destination's rank {dst_rank}; both engines must serve the same model, sharded without gaps or overlaps"
        )
    return chosen


def readers(src_rank: int, srcs: Sequence[KVLayout], dsts: Sequence[KVLayout]) -> frozenset[int]:
    """Ranks of `dsts` that the rank `src_rank` of `srcs` writes to."""
    return frozenset(rank for rank, dst in enumerate(dsts) if src_rank in writers(dst, rank, srcs))


def _span(pages: Int64s, first_token: int, page_size: int) -> range:
    if first_token % page_size:
        raise InvariantError(f"pages of {page_size} tokens cannot begin at token {first_token}")
    return range(first_token, first_token + len(pages) * page_size)


def _check_window(template: PageTemplate, tokens: range, src: range, dst: range) -> None:
    """Raise InvariantError unless `tokens` begins at a border and the pages of both sides hold it."""
    if not tokens:
        return
    if template.floor(tokens.start) != tokens.start:
        sizes = (template.src.page_size, template.dst.page_size)
        raise InvariantError(f"token {tokens.start} is no border of a page of {sizes[0]} or of {sizes[1]} tokens")
    for side, span in (("source", src), ("destination", dst)):
        if tokens.start < span.start or tokens.stop > span.stop:
            raise InvariantError(f"tokens {tokens} are not within the pages of the {side}, which hold {span}")


def _first_tokens(cell: Cell, tokens: range, group_tokens: int) -> Int64s:
    """The first token of each repetition of `cell` that begins in `tokens`."""
    missing = max(0, -(-(tokens.start - cell.first_token) // group_tokens))
    return np.arange(cell.first_token + missing * group_tokens, tokens.stop, group_tokens, dtype=np.int64)


def _cell(template: PageTemplate, first_token: int, num_tokens: int) -> Cell:
    """Runs by layer, K and V, token; the rows of all tokens at once where both sides hold the same heads."""
    src, dst = template.src, template.dst
    heads = overlap(src.kv_heads, dst.kv_heads)
    whole_rows = heads == src.kv_heads == dst.kv_heads
    num_steps, tokens_a_step = (1, num_tokens) if whole_rows else (num_tokens, 1)
    src_token, dst_token = first_token % src.page_size, first_token % dst.page_size
    runs = []
    for layer in overlap(src.layers, dst.layers):
        for kv in src.parts:
            region = 0
            dst_start = dst.offset(layer, kv, dst_token, heads.start)
            if template.dst_order is PageOrder.LAYER_MAJOR:
                region = kv * dst.num_layers + layer - dst.layers.start
                dst_start -= dst.offset(layer, kv, 0, dst.kv_heads.start)
            src_start = src.offset(layer, kv, src_token, heads.start)
            for step in range(num_steps):
                runs.append((src_start + step * src.row_nbytes, region, dst_start + step * dst.row_nbytes))
    src_offset, dst_region, dst_offset = np.array(runs, dtype=np.int64).T.copy()
    nbytes = np.full(len(runs), tokens_a_step * len(heads) * src.head_nbytes, dtype=np.int64)
    # Two regions' runs never seem adjacent: each region's begin at the same offset.
    starts = np.flatnonzero(np.concatenate(([True], ~_joins(src_offset, dst_offset, nbytes))))
    nbytes = np.add.reduceat(nbytes, starts)
    return Cell(first_token, num_tokens, src_offset[starts], dst_region[starts], dst_offset[starts], nbytes)


def _joins(src: Int64s, dst: Int64s, nbytes: Int64s) -> NDArray[np.bool_]:
    """For every run but the last, whether the next one follows it on both sides."""
    joins: NDArray[np.bool_] = (src[:-1] + nbytes[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
    return joins


def _merged(src: Int64s, dst: Int64s, nbytes: Int64s) -> Descriptors:
    """The same copies with adjacent ones joined."""
    if not len(nbytes):
        return Descriptors(src, dst, nbytes)
    starts = np.flatnonzero(np.concatenate(([True], ~_joins(src, dst, nbytes))))
    return Descriptors(src[starts], dst[starts], np.add.reduceat(nbytes, starts))


def _rows(addresses: Int64s, nbytes: Int64s, device: int) -> NDArray[np.uint64]:
    rows = np.empty((len(nbytes), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device
    return rows
