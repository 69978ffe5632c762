"""Choice of a backend by name."""

from __future__ import annotations

import pytest
import torch

from diptych.attention.reference import ReferenceAttention
from diptych.attention.registry import AUTO, BACKENDS, create_attention, resolve_attention
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool


def test_auto_is_the_first_registered() -> None:
    assert resolve_attention(AUTO) == next(iter(BACKENDS))


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_name_stands_for_itself(name: str) -> None:
    assert resolve_attention(name) == name


def test_an_unknown_name_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*auto, .*reference"):
        resolve_attention("flash")


def test_a_backend_is_made_over_its_pool() -> None:
    layout = KVLayout.single_rank(1, 1, head_dim=8, page_size=4, dtype="float32")
    pool = KVPool(layout, 2, torch.device("cpu"), torch.float32)
    backend = create_attention("reference", pool)
    assert isinstance(backend, ReferenceAttention)
    assert backend.pool is pool
