"""The KV pool of one rank: what its pages hold, and how many there are, which all ranks of an engine agree on.

Worker's thread, while it loads.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.config import EngineConfig
from diptych.core.messages import RankPool
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.layers.shard import kv_head_share
from diptych.models.transformer import Transformer
from diptych.parallel.mesh import Axis
from diptych.parallel.world import World
from diptych.resolve import max_num_seqs, token_budget
from diptych.worker.memory import num_pool_pages


def create_pool(
    config: EngineConfig, model: Transformer, *, dtype: torch.dtype, world: World | None, num_draft_layers: int = 0
) -> KVPool:
    """As large as asked for, or as memory allows once the largest step has had its share, on the rank with the least.

    num_draft_layers: what the pages hold beyond the model's own layers.
    Raises: ConfigError if there is too little memory.
    """
    layout = layout_of(model, config.cache.page_size, dtype)
    layout = replace(layout, layers=range(layout.layers.start, layout.layers.stop + num_draft_layers))
    cache = config.cache
    if world is not None and model.device.type == "cpu":
        cache = replace(cache, mem_sharers=cache.mem_sharers * world.placement.local_size)
    num_pages = num_pool_pages(cache, layout, model.device, step_nbytes=_step_nbytes(config, model, layout))
    if world is not None:
        num_pages = int(_of_all_ranks(world, [num_pages]).min().item())
    return KVPool(layout, num_pages, model.device, dtype)


def pools_of_ranks(pool: KVPool, world: World | None) -> tuple[RankPool, ...]:
    """What every rank keeps, and where, in the order of ranks. Collective."""
    layout = pool.layout
    own = (
        layout.layers.start,
        layout.num_layers,
        layout.kv_heads.start,
        layout.num_kv_heads,
        layout.page_nbytes,
        pool.data_ptr,
    )
    if world is None:
        return (RankPool(*own),)
    return tuple(RankPool(*facts) for facts in _of_all_ranks(world, list(own)).tolist())


def layout_of(model: Transformer, page_size: int, dtype: torch.dtype) -> KVLayout:
    """What the pages of a model's rank hold."""
    config = model.config
    is_latent = config.latent is not None
    share = kv_head_share(config.num_kv_heads, model.groups.attention)
    return KVLayout(
        layers=model.layer_ids,
        kv_heads=range(1) if is_latent else range(share.start, share.stop),
        head_dim=config.kv_head_dim,
        page_size=page_size,
        dtype=str(dtype).removeprefix("torch."),
        is_latent=is_latent,
    )


def _step_nbytes(config: EngineConfig, model: Transformer, layout: KVLayout) -> int:
    """What the largest step takes besides weights and pool; on a CPU the pool's share leaves room for it."""
    if model.device.type != "cuda":
        return 0
    # Imported here, as where the runner is made: a CPU needs neither Triton nor FlashInfer.
    from diptych.worker.cuda_memory import RESERVED_NBYTES, largest_step_nbytes

    if not model.groups.is_one_rank:  # a trial step would be a collective
        return RESERVED_NBYTES
    return largest_step_nbytes(
        model,
        layout,
        num_tokens=token_budget(config.scheduler, "cuda"),
        num_rows=max_num_seqs(config.scheduler, "cuda"),
    )


def _of_all_ranks(world: World, values: list[int]) -> torch.Tensor:
    """The values of every rank, int64 [ranks, values]."""
    return world.group(Axis.WORLD).all_gather(torch.tensor([values], dtype=torch.int64), dim=0)
