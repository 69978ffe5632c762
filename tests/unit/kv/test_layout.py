from __future__ import annotations

import itertools

import pytest

from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout

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
