"""From a configuration and a loaded model to a scheduler: the one place that knows which role an engine plays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from diptych.config import EngineConfig, TransferConfig
from diptych.core.messages import EngineInfo
from diptych.core.request import HandTo
from diptych.errors import ConfigError, RequestError
from diptych.kv.cache import KVCache
from diptych.resolve import token_budget
from diptych.scheduler.adapters import LocalPrefill, NoSink
from diptych.scheduler.groups import AnyScheduler, GroupedScheduler
from diptych.scheduler.scheduler import Scheduler
from diptych.scheduler.step import SchedulerLimits
from diptych.transfer.rooms import Rendezvous

if TYPE_CHECKING:
    from diptych.engine.agents import AgentChannel
    from diptych.engine.peering import Peering

Role = Literal["unified", "prefill", "decode"]

DEFAULT_INFLIGHT_STEPS = 2


def create_scheduler(config: EngineConfig, info: EngineInfo, peering: Peering | None) -> AnyScheduler:
    """A scheduler for one engine. With peers, any request may be computed or decoded by another engine; without, none
    is.
    """
    scheduler, speculative = config.scheduler, config.speculative
    device = info.device.split(":")[0]
    limits = SchedulerLimits(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=token_budget(scheduler, device),
        max_inflight_steps=scheduler.max_inflight_steps or _default_depth(config),
        max_queued_requests=scheduler.max_queued_requests,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        policy=scheduler.schedule_policy,
        request_timeout=scheduler.request_timeout,
        awaits_tokens=config.parallel.pp_size > 1,
        max_drafts=speculative.speculative_num_draft_tokens if speculative.is_on else 0,
        adapts_drafts=speculative.speculative_adaptive,
        max_loras=info.max_loras,
    )

    def cache() -> KVCache:
        return KVCache(info.num_pages, info.page_size, prefix_caching=config.cache.prefix_caching)

    if config.parallel.dp_size > 1:
        return GroupedScheduler([Scheduler(limits, cache()) for _ in range(config.parallel.dp_size)])
    if peering is None:
        return Scheduler(limits, cache(), source=LocalPrefill(), sink=NoSink())
    return Scheduler(limits, cache(), source=peering.hinge.receiver, sink=peering.hinge.sender)


def _default_depth(config: EngineConfig) -> int:
    """Steps in flight: drafts need the step before, a pipeline one step a stage; groups take steps one by one."""
    if config.speculative.is_on or config.parallel.dp_size > 1:
        return 1
    return config.parallel.pp_size if config.parallel.pp_size > 1 else DEFAULT_INFLIGHT_STEPS


def check_role(config: EngineConfig) -> None:
    """Raises: ConfigError for a role that an engine of so many ranks cannot play."""
    role, dp_size = config.transfer.role, config.parallel.dp_size
    if role != "unified" and dp_size > 1:
        raise ConfigError(f"role {role} with dp_size {dp_size} is not served yet; use --role unified, or --dp-size 1")


def create_peering(config: EngineConfig, info: EngineInfo, channel: AgentChannel | None) -> Peering | None:
    """What joins the engine to its peers, if its role names any. channel: to its ranks' processes, if there are any."""
    if config.transfer.role == "unified":
        return None
    # Imported here: an engine without peers needs neither NIXL nor its threads.
    from diptych.engine.peering import Peering

    return Peering(config.transfer, info, role=config.transfer.role, parallel=config.parallel, channel=channel)


def initial_role(config: TransferConfig) -> Role:
    """What an engine advertises from its start."""
    return config.role


def disaggregation_mode(role: Role) -> str:
    """The role under the name that SGLang's clients and routers know."""
    return "null" if role == "unified" else role


def has_registry(role: Role) -> bool:
    """Whether decode engines look for an engine of this role."""
    return role == "prefill"


def hand_to(role: Role, rendezvous: Rendezvous) -> HandTo | None:
    """What an engine of this role does for a request that names a rendezvous: compute the prompt and hand it over, or
    (None) decode what the engine at the rendezvous computes.

    Raises RequestError naming bootstrap_room if there is nobody to hand it to.
    """
    if role != "prefill":
        return None
    if rendezvous.room is None:
        raise RequestError(
            "a prefill engine needs a bootstrap_room to hand the prompt over; without one, ask a decode engine",
            param="bootstrap_room",
        )
    return HandTo(rendezvous.room)
