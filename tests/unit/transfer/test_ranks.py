"""Which rank writes to which: every byte of every reader once, whatever the shapes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from diptych.errors import PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.plan import overlap, shards
from diptych.transfer.ranks import Ranks, streams

NUM_LAYERS = 6
SHAPES = list(product((1, 2, 4, 8), (1, 2, 3)))


def full(num_kv_heads: int, *, is_latent: bool = False, page_size: int = 4) -> KVLayout:
    return KVLayout.single_rank(
        NUM_LAYERS, num_kv_heads, head_dim=8, page_size=page_size, dtype="float32", is_latent=is_latent
    )


def engine(layout: KVLayout, tp_size: int, pp_size: int, dp_size: int = 1) -> Ranks:
    """dp_size: groups that hold the same layers and heads of sequences of their own."""
    parts = shards(layout, tp_size=tp_size // dp_size, pp_size=pp_size)
    width = tp_size // dp_size
    spread = [parts[stage * width + place % width] for stage in range(pp_size) for place in range(tp_size)]
    return Ranks(tuple(spread), tp_size, dp_size)


def check_exactly_once(srcs: Ranks, dsts: Ranks, src_group: int = 0, dst_group: int = 0) -> None:
    found = streams(srcs, dsts, src_group=src_group, dst_group=dst_group)
    assert len(set(found)) == len(found)
    assert {writer for writer, _ in found} <= set(srcs.members(src_group))
    for reader in dsts.members(dst_group):
        dst, got = dsts.layouts[reader], Counter()
        for writer, _ in (stream for stream in found if stream[1] == reader):
            src = srcs.layouts[writer]
            got.update(product(overlap(src.layers, dst.layers), overlap(src.kv_heads, dst.kv_heads)))
        assert got == dict.fromkeys(product(dst.layers, dst.kv_heads), 1)


@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
def test_every_pair_of_shapes(num_kv_heads: int) -> None:
    for src, dst in product(SHAPES, SHAPES):
        check_exactly_once(engine(full(num_kv_heads), *src), engine(full(num_kv_heads, page_size=8), *dst))


def test_latent_rows_have_one_copy_of_many() -> None:
    for src, dst in product(SHAPES, SHAPES):
        srcs, dsts = (engine(full(1, is_latent=True), *shape) for shape in (src, dst))
        check_exactly_once(srcs, dsts)
    several = streams(engine(full(1, is_latent=True), 4, 1), engine(full(1, is_latent=True), 4, 1))
    assert several == [(0, 0), (1, 1), (2, 2), (3, 3)]  # copies are spread over those who have them


def test_only_the_ranks_of_the_rooms_groups_take_part() -> None:
    srcs, dsts = engine(full(2), 4, 2, dp_size=2), engine(full(2), 8, 1, dp_size=4)
    for src_group, dst_group in product(range(2), range(4)):
        check_exactly_once(srcs, dsts, src_group, dst_group)
    assert streams(srcs, dsts, src_group=1, dst_group=3) == [(2, 6), (6, 6), (3, 7), (7, 7)]
    assert [srcs.group_of(room) for room in (0, 1, 2, 7)] == [0, 1, 0, 1]


def test_who_lacks_a_part_of_the_model_cannot_fill_anybody() -> None:
    lacking = Ranks((shards(full(2), tp_size=2, pp_size=1)[0],))
    with pytest.raises(PeerIncompatible, match="hold 6 of the 12"):
        streams(lacking, engine(full(2), 1, 1))


@pytest.mark.parametrize("sizes", [(3, 2, 1), (2, 2, 3), (0, 1, 1)])
def test_ranks_that_are_no_engine(sizes: tuple[int, int, int]) -> None:
    num_ranks, tp_size, dp_size = sizes
    with pytest.raises(PeerIncompatible):
        Ranks((full(2),) * num_ranks, tp_size, dp_size)
