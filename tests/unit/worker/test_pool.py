"""The pools of several ranks: what each holds, and that all have as many pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_steps import model_of
from thread_ranks import ThreadWorld, run_ranks

from diptych.config import CacheConfig, EngineConfig
from diptych.core.messages import RankPool
from diptych.parallel.mesh import MeshSizes
from diptych.worker.pool import create_pool, pools_of_ranks

CONFIG = EngineConfig(cache=CacheConfig(page_size=4, kv_cache_memory="1MiB"))


def pools_of(case: str, sizes: MeshSizes, configs: dict[int, EngineConfig]) -> list[tuple[int, tuple[RankPool, ...]]]:
    def work(world: ThreadWorld) -> tuple[int, tuple[RankPool, ...]]:
        model = model_of(case, world.groups)
        config = configs.get(world.mesh.rank, CONFIG)
        pool = create_pool(config, model, dtype=next(model.parameters()).dtype, world=world)
        pools = pools_of_ranks(pool, world)
        assert pools[world.mesh.rank].kv_address == pool.data_ptr
        return pool.num_pages, pools

    return run_ranks(sizes, work)


def held(pools: tuple[RankPool, ...]) -> list[tuple[int, int, int, int]]:
    return [(pool.first_layer, pool.num_layers, pool.first_kv_head, pool.num_kv_heads) for pool in pools]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (MeshSizes(tp=2), [(0, 3, 0, 1), (0, 3, 1, 1)]),
        (MeshSizes(tp=4), [(0, 3, 0, 1), (0, 3, 0, 1), (0, 3, 1, 1), (0, 3, 1, 1)]),
        (MeshSizes(pp=2), [(0, 2, 0, 2), (2, 1, 0, 2)]),
    ],
    ids=["tp2", "tp4-replicated", "pp2"],
)
def test_all_ranks_know_what_each_holds(sizes: MeshSizes, expected: list[tuple[int, int, int, int]]) -> None:
    results = pools_of("llama", sizes, {})
    assert [held(pools) for _, pools in results] == [expected] * sizes.world
    assert len({pools for _, pools in results}) == 1
    assert len({num_pages for num_pages, _ in results}) == 1


def test_the_rank_with_the_least_memory_decides() -> None:
    poor = replace(CONFIG, cache=replace(CONFIG.cache, kv_cache_memory="64KiB"))
    (rich, _), *_ = pools_of("llama", MeshSizes(tp=2), {})
    counts = [num_pages for num_pages, _ in pools_of("llama", MeshSizes(tp=2), {1: poor})]
    assert counts[0] == counts[1] == rich // 16


def test_latent_pages_are_whole_on_every_rank() -> None:
    results = pools_of("deepseek-v3", MeshSizes(tp=2), {})
    assert held(results[0][1]) == [(0, 3, 0, 1), (0, 3, 0, 1)]
