"""From a configuration and a loaded model to a scheduler: the one place that knows which role an engine plays."""

from __future__ import annotations

from diptych.config import SchedulerConfig
from diptych.core.messages import EngineInfo
from diptych.kv.cache import KVCache
from diptych.scheduler.adapters import LocalPrefill, NoSink
from diptych.scheduler.scheduler import Scheduler
from diptych.scheduler.step import SchedulerLimits

DEFAULT_INFLIGHT_STEPS = 2
DEFAULT_TOKEN_BUDGET = {"cpu": 1024, "cuda": 8192}


def create_scheduler(config: SchedulerConfig, info: EngineInfo, *, prefix_caching: bool) -> Scheduler:
    """A scheduler for one engine that prefills and decodes its own requests (unified)."""
    device = info.device.split(":")[0]
    limits = SchedulerLimits(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET[device],
        max_inflight_steps=config.max_inflight_steps or DEFAULT_INFLIGHT_STEPS,
        max_queued_requests=config.max_queued_requests,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        policy=config.schedule_policy,
        request_timeout=config.request_timeout,
    )
    cache = KVCache(info.num_pages, info.page_size, prefix_caching=prefix_caching)
    return Scheduler(limits, cache, source=LocalPrefill(), sink=NoSink())
