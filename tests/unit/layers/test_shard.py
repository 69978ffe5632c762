"""Dimensions dealt to ranks: everything is held, and by whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import ConfigError
from diptych.layers.shard import Share, even_share, kv_head_share, vocabulary_share
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE

sizes = st.integers(1, 300)
few = st.integers(1, 9)


class Seat(GroupCoordinator):
    """A place in a group that is never called."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def seats(size: int) -> list[Seat]:
    return [Seat(rank, size) for rank in range(size)]


@given(sizes, few)
def test_an_even_share_tiles_the_dimension(count: int, ranks: int) -> None:
    shares = [even_share(count * ranks, seat, "things") for seat in seats(ranks)]
    assert [(share.start, share.stop) for share in shares] == [(count * r, count * (r + 1)) for r in range(ranks)]


@given(sizes, few)
def test_the_vocabulary_is_tiled_and_only_the_last_has_less(size: int, ranks: int) -> None:
    if size <= -(-size // ranks) * (ranks - 1):
        with pytest.raises(ConfigError, match=f"a vocabulary of {size} is too small for {ranks} ranks"):
            vocabulary_share(size, Seat(ranks - 1, ranks))
        return
    shares = [vocabulary_share(size, seat) for seat in seats(ranks)]
    assert [index for share in shares for index in range(share.start, share.stop)] == list(range(size))
    assert len({len(share) for share in shares[:-1]}) <= 1
    assert len(shares[-1]) <= len(shares[0])


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_a_ranks_query_heads_attend_to_the_kv_head_that_it_holds(kv_heads: int, ranks: int, groups: int) -> None:
    """Query head h uses KV head h // (heads / KV heads), counted in the model and counted on the rank."""
    num_heads = kv_heads * groups * ranks
    held = []
    for seat in seats(ranks):
        queries, keys = even_share(num_heads, seat, "heads"), kv_head_share(kv_heads, seat)
        held += range(keys.start, keys.stop)
        local = len(queries) // len(keys)
        for index, head in enumerate(range(queries.start, queries.stop)):
            assert keys.start + index // local == head // (num_heads // kv_heads)
    assert sorted(set(held)) == list(range(kv_heads))


def test_numbers_that_do_not_come_out_even_are_named() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot share 8 attention heads evenly"):
        even_share(8, Seat(0, 3), "attention heads")
    with pytest.raises(ConfigError, match="8 KV heads evenly"):
        kv_head_share(8, Seat(0, 3))
    with pytest.raises(ConfigError, match="3 KV heads cannot be dealt to 4 ranks"):
        kv_head_share(3, Seat(0, 4))


def test_one_rank_holds_everything() -> None:
    assert even_share(7, ALONE, "things") == vocabulary_share(7, ALONE) == Share.whole(7)
    assert kv_head_share(3, ALONE).is_whole
    assert Share(1, 3, 4).times(8) == Share(8, 24, 32)
