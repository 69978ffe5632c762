from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout, stage_layers

LAYOUT = KVLayout(layers=range(4, 7), kv_heads=range(2, 4), head_dim=8, page_size=5, dtype="bfloat16")


def test_offsets_walk_through_a_page_in_the_order_of_its_shape() -> None:
    cells = itertools.product(LAYOUT.layers, (0, 1), range(LAYOUT.page_size), LAYOUT.kv_heads)
    offsets = [LAYOUT.offset(layer, kv, token, head) for layer, kv, token, head in cells]
    assert offsets == list(range(0, LAYOUT.page_nbytes, LAYOUT.head_nbytes))


def test_sizes() -> None:
    assert LAYOUT.page_shape == (3, 2, 5, 2, 8)
    assert LAYOUT.head_nbytes == 16
    assert LAYOUT.row_nbytes == 32
    assert LAYOUT.token_nbytes == 3 * 2 * 2 * 8 * 2
    assert LAYOUT.page_nbytes == 5 * LAYOUT.token_nbytes


def test_single_rank_holds_everything() -> None:
    layout = KVLayout.single_rank(3, 2, head_dim=8, page_size=16, dtype="float32")
    assert (layout.layers, layout.kv_heads, layout.itemsize) == (range(3), range(2), 4)


@pytest.mark.parametrize(
    ("num_layers", "head_dim", "page_size", "dtype"),
    [(0, 8, 16, "float32"), (1, 0, 16, "float32"), (1, 8, 0, "float32"), (1, 8, 16, "int3")],
)
def test_senseless_values_are_refused(num_layers: int, head_dim: int, page_size: int, dtype: str) -> None:
    with pytest.raises(ConfigError):
        KVLayout.single_rank(num_layers, 1, head_dim=head_dim, page_size=page_size, dtype=dtype)


def test_layers_with_gaps_are_refused() -> None:
    with pytest.raises(ConfigError, match="adjacent"):
        KVLayout(layers=range(0, 8, 2), kv_heads=range(1), head_dim=8, page_size=16, dtype="float32")


LATENT = KVLayout.single_rank(3, 1, head_dim=24, page_size=5, dtype="bfloat16", is_latent=True)


def test_a_latent_page_has_one_row_a_token_and_layer() -> None:
    assert LATENT.page_shape == (3, 1, 5, 1, 24)
    assert LATENT.token_nbytes == 3 * 24 * 2
    cells = itertools.product(LATENT.layers, LATENT.parts, range(5))
    assert [LATENT.offset(layer, part, token, 0) for layer, part, token in cells] == list(
        range(0, LATENT.page_nbytes, LATENT.row_nbytes)
    )


def test_a_latent_layout_has_no_heads_to_deal_out() -> None:
    with pytest.raises(ConfigError, match="latent"):
        KVLayout.single_rank(3, 2, head_dim=24, page_size=5, dtype="bfloat16", is_latent=True)


@given(st.integers(1, 80), st.integers(1, 80))
def test_stages_tile_the_layers_and_differ_by_one(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ConfigError, match=f"{layers} layers are too few for {stages} stages"):
            stage_layers(layers, 0, stages)
        return
    dealt = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [layer for stage in dealt for layer in stage] == list(range(layers))
    counts = [len(stage) for stage in dealt]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_five_layers() -> None:
    assert [stage_layers(5, stage, 2) for stage in range(2)] == [range(3), range(3, 5)]
    assert [stage_layers(5, stage, 3) for stage in range(3)] == [range(2), range(2, 4), range(4, 5)]
