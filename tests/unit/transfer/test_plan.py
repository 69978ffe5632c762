"""Page plans: every destination byte exactly once, whatever the two sides' sharding, page sizes, order and window."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import ConfigError, InvariantError, PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.plan import (
    Descriptors,
    PageOrder,
    PageTemplate,
    page_template,
    plan,
    readers,
    shards,
    writers,
)

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 6, 4, 2
POOL_PAGES = 12
GRID = list(product((1, 2, 4, 8), (1, 2, 3), (1, 2, 4, 8), (1, 2, 3)))


def full_layout(page_size: int = 4) -> KVLayout:
    return KVLayout.single_rank(NUM_LAYERS, NUM_HEADS, head_dim=HEAD_DIM, page_size=page_size, dtype="bfloat16")


def truth_of(num_tokens: int) -> np.ndarray:
    """A different value everywhere: uint16 [num_tokens, layers, K or V, heads, dim], none of them 0."""
    shape = (num_tokens, NUM_LAYERS, 2, NUM_HEADS, HEAD_DIM)
    return (np.arange(np.prod(shape)) % 65521 + 1).astype(np.uint16).reshape(shape)


@dataclass
class Memory:
    """One rank's pool as bytes at a made-up address, and how often each byte was written."""

    layout: KVLayout
    order: PageOrder = PageOrder.PAGE_MAJOR
    base: int = 1 << 40

    def __post_init__(self) -> None:
        self.content = np.zeros(POOL_PAGES * self.layout.page_nbytes, np.uint8)
        self.writes = np.zeros_like(self.content)

    @property
    def bases(self) -> list[int]:
        if self.order is PageOrder.PAGE_MAJOR:
            return [self.base]
        num_regions = len(self.layout.parts) * self.layout.num_layers
        return [self.base + index * self.content.nbytes // num_regions for index in range(num_regions)]

    def tokens(self, array: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """The bytes of `array` for these pages, by token: [tokens, layers, K or V, heads, head bytes]."""
        layers, parts, size, heads, _ = self.layout.page_shape
        if self.order is PageOrder.PAGE_MAJOR:
            by_page = array.reshape(POOL_PAGES, layers, parts, size, heads, -1)[pages]
        else:
            by_page = array.reshape(parts, layers, POOL_PAGES, size, heads, -1)[:, :, pages].transpose(2, 1, 0, 3, 4, 5)
        return by_page.transpose(0, 3, 1, 2, 4, 5).reshape(len(pages) * size, layers, parts, heads, -1)

    def fill(self, truth: np.ndarray, pages: np.ndarray) -> None:
        """Store the tokens of `truth` in these pages."""
        layout = self.layout
        pool = self.content.view(np.uint16).reshape(POOL_PAGES, *layout.page_shape)
        for token, values in enumerate(truth):
            page, offset = pages[token // layout.page_size], token % layout.page_size
            pool[page, :, :, offset] = self.mine(values)

    def mine(self, values: np.ndarray) -> np.ndarray:
        """The layers and heads of this rank, of [..., layers, K or V, heads, dim]."""
        layers, heads = self.layout.layers, self.layout.kv_heads
        return values[..., layers.start : layers.stop, :, heads.start : heads.stop, :]


def copy(descriptors: Descriptors, src: Memory, dst: Memory) -> None:
    for a, b, nbytes in zip(descriptors.src, descriptors.dst, descriptors.nbytes, strict=True):
        start, end = int(b) - dst.base, int(b + nbytes) - dst.base
        assert 0 <= start < end <= dst.content.nbytes
        assert a - src.base >= 0 and a + nbytes - src.base <= src.content.nbytes
        dst.content[start:end] = src.content[a - src.base : a + nbytes - src.base]
        dst.writes[start:end] += 1


def pages_for(num_tokens: int, page_size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(POOL_PAGES)[: -(-num_tokens // page_size)].astype(np.int64)


def check_written(dst: Memory, pages: np.ndarray, truth: np.ndarray, *, first: int, computed: int, end: int) -> None:
    """Tokens first..end were written once, first..computed are right, and nothing else was touched."""
    counts = dst.tokens(dst.writes, pages)
    assert (counts[first:end] == 1).all() and not counts[:first].any() and not counts[end:].any()
    assert dst.writes.sum() == counts.sum()
    got = np.ascontiguousarray(dst.tokens(dst.content, pages)[first:computed]).view(np.uint16)
    assert (got == dst.mine(truth[first:computed])).all()


@pytest.mark.parametrize("src_tp,src_pp,dst_tp,dst_pp", GRID)
def test_every_pair_of_shardings(src_tp: int, src_pp: int, dst_tp: int, dst_pp: int) -> None:
    truth = truth_of(10)
    src_pages, dst_pages = pages_for(10, 4, 0), pages_for(10, 4, 1)
    sources = [Memory(layout) for layout in shards(full_layout(), tp_size=src_tp, pp_size=src_pp)]
    for source in sources:
        source.fill(truth, src_pages)
    layouts = [source.layout for source in sources]
    for rank, layout in enumerate(shards(full_layout(), tp_size=dst_tp, pp_size=dst_pp)):
        dst = Memory(layout)
        for writer in writers(layout, rank, layouts):
            template = page_template(layouts[writer], layout)
            src = sources[writer]
            copy(plan(template, src_pages, dst_pages=dst_pages, src_base=src.base, dst_bases=dst.bases), src, dst)
        check_written(dst, dst_pages, truth, first=0, computed=10, end=12)


@pytest.mark.parametrize("src_tp,src_pp,dst_tp,dst_pp", GRID)
def test_latent_rows_are_written_once(src_tp: int, src_pp: int, dst_tp: int, dst_pp: int) -> None:
    """Every rank of a tensor group holds the same rows: each destination rank is written by one rank of each stage."""
    full = KVLayout.single_rank(6, 1, head_dim=9, page_size=4, dtype="bfloat16", is_latent=True)
    truth = np.random.default_rng(0).integers(0, 1 << 16, (11, 6, 1, 1, 9), dtype=np.uint16)
    src_pages, dst_pages = pages_for(11, 4, seed=1), pages_for(11, 4, seed=2)
    sources = [Memory(layout) for layout in shards(full, tp_size=src_tp, pp_size=src_pp)]
    for source in sources:
        source.fill(truth, src_pages)
    for order in PageOrder:
        for rank, layout in enumerate(shards(full, tp_size=dst_tp, pp_size=dst_pp)):
            dst = Memory(layout, order)
            for writer in writers(layout, rank, [source.layout for source in sources]):
                src = sources[writer]
                template = page_template(src.layout, layout, dst_order=order)
                copy(plan(template, src_pages, dst_pages=dst_pages, src_base=src.base, dst_bases=dst.bases), src, dst)
            check_written(dst, dst_pages, truth, first=0, computed=11, end=12)


@pytest.mark.parametrize("src_tp,src_pp,dst_tp,dst_pp", GRID)
def test_writers_and_readers_agree(src_tp: int, src_pp: int, dst_tp: int, dst_pp: int) -> None:
    sources = shards(full_layout(), tp_size=src_tp, pp_size=src_pp)
    targets = shards(full_layout(), tp_size=dst_tp, pp_size=dst_pp)
    pairs = {(writer, rank) for rank, target in enumerate(targets) for writer in writers(target, rank, sources)}
    assert pairs == {(rank, reader) for rank in range(len(sources)) for reader in readers(rank, sources, targets)}


def test_replicas_share_the_work() -> None:
    sources = shards(full_layout(), tp_size=8, pp_size=1)  # 4 heads: ranks 0 and 1 hold the same one
    targets = shards(full_layout(), tp_size=8, pp_size=1)
    assert sources[0] == sources[1]
    assert [writers(target, rank, sources) for rank, target in enumerate(targets)] == [{rank} for rank in range(8)]


def test_a_gap_or_an_overlap_is_refused() -> None:
    sources = shards(full_layout(), tp_size=2, pp_size=1)
    with pytest.raises(PeerIncompatible, match="hold 12 of the 24"):
        writers(full_layout(), 0, sources[:1])
    with pytest.raises(PeerIncompatible, match="hold 36 of the 24"):
        writers(full_layout(), 0, [*sources, replace(sources[0], kv_heads=range(1, 3))])


@pytest.mark.parametrize("src_size,dst_size", [*list(product((8, 16, 32), repeat=2)), (4, 6), (6, 4), (1, 8), (8, 1)])
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9])
def test_unequal_pages(src_size: int, dst_size: int, order: PageOrder, num_tokens: int) -> None:
    for src_tp, dst_tp in ((1, 1), (2, 4), (4, 2)):
        sources = [Memory(layout) for layout in shards(full_layout(src_size), tp_size=src_tp, pp_size=1)]
        truth = truth_of(num_tokens)
        src_pages, dst_pages = pages_for(num_tokens, src_size, 2), pages_for(num_tokens, dst_size, 3)
        layouts = [source.layout for source in sources]
        end = min(len(src_pages) * src_size, len(dst_pages) * dst_size)
        for rank, layout in enumerate(shards(full_layout(dst_size), tp_size=dst_tp, pp_size=1)):
            dst = Memory(layout, order)
            for writer in writers(layout, rank, layouts):
                src = sources[writer]
                src.fill(truth, src_pages)
                template = page_template(src.layout, layout, dst_order=order)
                copy(plan(template, src_pages, dst_pages=dst_pages, src_base=src.base, dst_bases=dst.bases), src, dst)
            check_written(dst, dst_pages, truth, first=0, computed=num_tokens, end=end)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chunks_and_a_held_prefix(data: st.DataObject) -> None:
    """Chunks end anywhere; what can be sent of each is sent, and together they write every byte once."""
    src_size, dst_size = data.draw(st.sampled_from([(8, 8), (8, 16), (16, 8), (4, 6), (8, 32), (32, 8)]))
    order = data.draw(st.sampled_from(PageOrder))
    dst_tp = data.draw(st.sampled_from([1, 2]))
    num_tokens = data.draw(st.integers(1, 48))
    cached = data.draw(st.integers(0, (num_tokens - 1) // dst_size)) * dst_size
    ends = sorted({*data.draw(st.lists(st.integers(1, num_tokens), max_size=4)), num_tokens})
    src = Memory(full_layout(src_size))
    dst = Memory(shards(full_layout(dst_size), tp_size=dst_tp, pp_size=1)[-1], order)
    truth = truth_of(num_tokens)
    src_pages, dst_pages = pages_for(num_tokens, src_size, 4), pages_for(num_tokens, dst_size, 5)
    src.fill(truth, src_pages)
    template = page_template(src.layout, dst.layout, dst_order=order)
    sent = cached
    for end in ends:
        upto = end if end == num_tokens else max(sent, template.floor(end))
        chunk = plan(
            template,
            src_pages[: -(-upto // src_size)],
            dst_pages=dst_pages[cached // dst_size :],
            src_base=src.base,
            dst_bases=dst.bases,
            tokens=range(sent, upto),
            dst_first_token=cached,
        )
        copy(chunk, src, dst)
        sent = upto
    covered = min(len(src_pages) * src_size, len(dst_pages) * dst_size)
    check_written(dst, dst_pages, truth, first=cached, computed=num_tokens, end=covered)


def test_the_source_may_begin_late_too() -> None:
    layout = full_layout()
    template = page_template(layout, layout)
    late = plan(template, np.array([7]), dst_pages=np.array([1, 2, 3]), src_base=0, dst_bases=[0], src_first_token=8)
    assert (late.src.tolist(), late.dst.tolist()) == ([7 * layout.page_nbytes], [3 * layout.page_nbytes])


def test_same_layout_is_one_run_and_adjacent_pages_are_one_descriptor() -> None:
    layout = shards(full_layout(), tp_size=2, pp_size=3)[3]
    template = page_template(layout, layout)
    assert template.num_runs == 1
    src, dst = np.array([4, 5, 6, 8, 9, 1, 2]), np.array([0, 1, 2, 3, 4, 7, 9])
    found = plan(template, src, dst_pages=dst, src_base=1000, dst_bases=[5000])
    page = layout.page_nbytes
    assert found.src.tolist() == [1000 + 4 * page, 1000 + 8 * page, 1000 + 1 * page, 1000 + 2 * page]
    assert found.dst.tolist() == [5000, 5000 + 3 * page, 5000 + 7 * page, 5000 + 9 * page]
    assert found.nbytes.tolist() == [3 * page, 2 * page, page, page]
    assert found.total_nbytes == 7 * page


def test_a_base_format_destination_gets_one_item_per_layer_and_page() -> None:
    layout = full_layout()
    template = page_template(layout, layout, dst_order=PageOrder.LAYER_MAJOR)
    item = layout.page_size * layout.num_kv_heads * layout.head_dim * layout.itemsize
    bases = [10**6 * (index + 1) for index in range(2 * NUM_LAYERS)]
    found = plan(template, np.array([3]), dst_pages=np.array([5]), src_base=0, dst_bases=bases)
    assert template.num_dst_regions == len(found) == 2 * NUM_LAYERS
    assert set(found.nbytes.tolist()) == {item}
    keys = [bases[layer] + 5 * item for layer in range(NUM_LAYERS)]
    values = [bases[NUM_LAYERS + layer] + 5 * item for layer in range(NUM_LAYERS)]
    assert found.dst.tolist() == [address for pair in zip(keys, values, strict=True) for address in pair]
    assert found.src.tolist() == [3 * layout.page_nbytes + index * item for index in range(2 * NUM_LAYERS)]


def test_disjoint_ranks_never_talk() -> None:
    first, second = shards(full_layout(), tp_size=2, pp_size=1)
    template = page_template(first, second)
    assert template.cells == ()
    assert len(plan(template, np.array([0]), dst_pages=np.array([0]), src_base=0, dst_bases=[0])) == 0


def test_rows_are_what_a_backend_takes() -> None:
    one = np.array([1], dtype=np.int64)
    found = Descriptors(one * 100, one * 200, one * 30)
    assert found.src_rows(2).tolist() == [[100, 30, 2]]
    assert found.dst_rows(0).tolist() == [[200, 30, 0]]
    assert found.src_rows(0).dtype == np.uint64


@pytest.mark.parametrize("field,value", [("dtype", "float32"), ("head_dim", 3)])
def test_what_cannot_be_converted_is_refused_with_both_values(field: str, value: object) -> None:
    ours = full_layout()
    theirs = replace(ours, **{field: value})
    with pytest.raises(PeerIncompatible, match=f"{field} is .* at the source and {value} at the destination"):
        page_template(ours, theirs)


@pytest.mark.parametrize(
    "changed,message",
    [
        ({"tokens": range(2, 8)}, "token 2 is no border"),
        ({"tokens": range(13)}, "not within the pages of the source"),
        ({"tokens": range(8), "dst_first_token": 4}, "not within the pages of the destination"),
        ({"dst_first_token": 3}, "cannot begin at token 3"),
        ({"dst_bases": [0, 0]}, "1 base addresses needed, the destination has 2"),
    ],
)
def test_windows_outside_the_pages_are_bugs(changed: dict[str, object], message: str) -> None:
    template = page_template(full_layout(), full_layout())
    pages = np.arange(3)
    with pytest.raises(InvariantError, match=message):
        plan(template, pages, **{"dst_pages": pages, "src_base": 0, "dst_bases": [0], **changed})


def test_shards_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 KV heads cannot be dealt to tp_size 3"):
        shards(full_layout(), tp_size=3, pp_size=1)
    with pytest.raises(ConfigError, match="6 layers are too few for 7 stages"):
        shards(full_layout(), tp_size=1, pp_size=7)


def best_of(template: PageTemplate, pages: np.ndarray) -> float:
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        plan(template, pages, dst_pages=pages, src_base=0, dst_bases=[0])
        best = min(best, time.perf_counter() - start)
    return best


def test_a_thousand_pages_are_planned_in_well_under_a_millisecond() -> None:
    layout = KVLayout.single_rank(32, 8, head_dim=128, page_size=16, dtype="bfloat16")
    pages = np.random.default_rng(0).permutation(4000)[:1000].astype(np.int64)
    assert best_of(page_template(layout, layout), pages) < 0.5e-3
