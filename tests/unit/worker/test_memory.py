"""How many pages, how long a sequence: what is asked for, what is free, what the model allows."""

from __future__ import annotations

import pytest
import torch

from diptych.config import CacheConfig
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.worker.memory import free_nbytes, num_pool_pages, resolve_max_model_len

CPU = torch.device("cpu")
LAYOUT = KVLayout.single_rank(2, 1, head_dim=8, page_size=16, dtype="float32")


def test_a_size_is_taken_at_its_word() -> None:
    assert LAYOUT.page_nbytes == 2048
    assert num_pool_pages(CacheConfig(kv_cache_memory="1MiB"), LAYOUT, CPU) == 512


def test_the_default_is_a_share_of_what_is_free() -> None:
    pages = num_pool_pages(CacheConfig(mem_fraction=0.001), LAYOUT, CPU)
    assert 2 <= pages <= 0.0012 * free_nbytes(CPU) / LAYOUT.page_nbytes


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match="are free on cpu"):
        num_pool_pages(CacheConfig(kv_cache_memory="1000TiB"), LAYOUT, CPU)


def test_less_than_two_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        num_pool_pages(CacheConfig(kv_cache_memory="4000"), LAYOUT, CPU)


@pytest.mark.parametrize(("requested", "found"), [(None, 100), (50, 50), (100, 100)])
def test_max_model_len(requested: int | None, found: int) -> None:
    assert resolve_max_model_len(requested, 100, 1000) == found


def test_max_model_len_is_bounded_by_the_pool() -> None:
    assert resolve_max_model_len(None, 1000, 100) == 100
    with pytest.raises(ConfigError, match="raise kv_cache_memory"):
        resolve_max_model_len(200, 1000, 100)
    with pytest.raises(ConfigError, match="made for 1000 positions"):
        resolve_max_model_len(2000, 1000, 100)
