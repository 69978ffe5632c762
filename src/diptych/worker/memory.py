"""How much memory the KV pool gets, and how long a sequence may then be."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch

from diptych.config import CacheConfig
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.resolve import parse_size

logger = logging.getLogger(__name__)

MAX_DEFAULT_POOL_NBYTES_CPU = 4 * 2**30
CUDA_CONTEXT_NBYTES = 768 << 20  # the driver's own part of a process: code, stacks, cuBLAS
DEFAULT_MEM_FRACTION = {"cpu": 0.5, "cuda": 0.9}


def free_nbytes(device: torch.device) -> int:
    """Memory that a pool could take now: free on the GPU; on a CPU available, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit = _cgroup_limit()
    if limit is not None:
        available = min(available, limit - psutil.Process().memory_info().rss)
    return max(0, available)


def _cgroup_limit() -> int | None:
    """Memory limit of this process's control group (version 2 or 1), None if there is none."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file():
            text = path.read_text().strip()
            return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


def num_pool_pages(config: CacheConfig, layout: KVLayout, device: torch.device, *, step_nbytes: int = 0) -> int:
    """Pages of the KV pool: `kv_cache_memory` if set, else what `mem_fraction` allows (at most 4 GiB on a CPU).

    Args: step_nbytes: what the largest step takes besides.
    Raises: ConfigError if not even two pages fit, or if more is asked for than is free.
    """
    free = max(0, free_nbytes(device) - step_nbytes)
    if config.kv_cache_memory is not None:
        nbytes = parse_size(config.kv_cache_memory, name="kv_cache_memory")
        if nbytes > free:
            raise ConfigError(
                f"kv_cache_memory is {nbytes / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are free on {device};"
                " ask for less"
            )
    else:
        share = (config.mem_fraction or DEFAULT_MEM_FRACTION[device.type]) / config.mem_sharers
        if device.type == "cpu":
            nbytes = min(int(free * share), MAX_DEFAULT_POOL_NBYTES_CPU)
        else:
            nbytes = min(free, _share_of_gpu(device, share) - step_nbytes)
        logger.info("KV pool: %.2f GiB of %.2f GiB free on %s", nbytes / 2**30, free / 2**30, device)
    num_pages = nbytes // layout.page_nbytes
    if num_pages < 2:
        raise ConfigError(
            f"a KV pool of {nbytes} bytes holds {num_pages} pages of {layout.page_nbytes} bytes; at least 2 are needed:"
            " raise kv_cache_memory or mem_fraction, or lower page_size"
        )
    return num_pages


def _share_of_gpu(device: torch.device, share: float) -> int:
    """What is left of a share of the whole GPU after this process's weights: engines that start together on one GPU
    must not count on memory that another is about to take, so what is free says nothing.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * share) - torch.cuda.memory_reserved(device) - CUDA_CONTEXT_NBYTES


def resolve_max_model_len(requested: int | None, model_max: int, num_kv_tokens: int) -> int:
    """Longest sequence that model and pool allow. Raises ConfigError if more was asked for than either holds."""
    if requested is None:
        if num_kv_tokens < model_max:
            logger.info(
                "max_model_len: %d, as much as the KV pool holds (the model allows %d)", num_kv_tokens, model_max
            )
        return min(model_max, num_kv_tokens)
    if requested > model_max:
        raise ConfigError(f"max_model_len is {requested}, but the model was made for {model_max} positions")
    if requested > num_kv_tokens:
        raise ConfigError(
            f"max_model_len is {requested}, but the KV pool holds {num_kv_tokens} tokens; raise kv_cache_memory"
        )
    return requested
