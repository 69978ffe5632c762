"""`diptych pd [MODEL]`: prefill and decode engines of one model on this machine, behind one URL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.cli.flags import EngineFlags, parse_engine_flags
from diptych.config import EngineConfig, TransferConfig
from diptych.engine.roles import check_role
from diptych.errors import ConfigError
from diptych.log import setup_logging
from diptych.resolve import resolve, validate
from diptych.router.config import PolicyName, Role, RouterConfig, resolve_router

DESCRIPTION = (
    "Serve a model with prefill and decode apart: starts the engines and a router on this machine and prints one URL. "
    "The flags are those of `diptych serve`; --host and --port are the router's. Without MODEL: the demo model."
)
_LOOPBACK = "127.0.0.1"
# What this command decides for each engine.
_OWN_FIELDS = ("role", "peer_host", "peer_port", "disaggregation_bootstrap_port")


@dataclass(frozen=True, kw_only=True)
class PdFlags(EngineFlags):
    """The flags of `diptych pd`."""

    prefill: int = 1
    """Prefill engines."""
    decode: int = 1
    """Decode engines."""
    policy: PolicyName = RouterConfig.policy
    """Which engine gets a request; chooses each of the pair."""
    prefill_tp: int | None = None
    """Ranks of each prefill engine that share every layer; default: --tp-size."""
    decode_tp: int | None = None
    """Ranks of each decode engine that share every layer; default: --tp-size."""


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. Raises: ConfigError before anything is started."""
    flags = parse_engine_flags(PdFlags, arguments, prog="diptych pd", description=DESCRIPTION)
    _check(flags)
    setup_logging("pd", flags.engine.server.log_level)
    config = resolve(flags.engine)
    router = resolve_router(router_config(config, flags.policy))
    # Imported only now: the web framework takes longer to import than --help may take.
    from diptych.cli.pd_cluster import EngineChild, EnginePlan, run_cluster
    from diptych.server.progress import cluster_banner

    def announce(port: int, children: Sequence[EngineChild]) -> None:
        ready = [child.ready.result() for child in children]
        urls = [f"http://{_LOOPBACK}:{each.port}" for each in ready]
        engines = [(child.plan.name, url) for child, url in zip(children, urls, strict=True)]
        model = f"{ready[0].architecture}, {ready[0].dtype}, {ready[0].device}"
        print(cluster_banner(config.server, ready[0].model_name, port, model=model, engines=engines), flush=True)

    configs = engine_configs(
        config,
        num_prefill=flags.prefill,
        num_decode=flags.decode,
        prefill_tp=flags.prefill_tp,
        decode_tp=flags.decode_tp,
    )
    for _, _, engine in configs:
        validate(engine)
        check_role(engine)
    plans = [EnginePlan(name=name, role=role, config=engine) for name, role, engine in configs]
    return run_cluster(plans, router, needs_prefill=not config.transfer.local_prefill, on_ready=announce)


def _check(flags: PdFlags) -> None:
    for name, count in (("--prefill", flags.prefill), ("--decode", flags.decode)):
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}; `diptych serve` runs one engine that does both")
    if flags.engine.parallel.nnodes not in (None, 1):
        raise ConfigError(
            f"`diptych pd` runs on one machine, but nnodes is {flags.engine.parallel.nnodes}; start the engines "
            "yourself with `diptych serve`, and `diptych route`"
        )
    given, usual = vars(flags.engine.transfer), vars(TransferConfig())
    for name in _OWN_FIELDS:
        if given[name] != usual[name]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} is chosen for each engine by `diptych pd`; leave it out, or start the engines "
                "yourself with `diptych serve` and `diptych route`"
            )


def router_config(config: EngineConfig, policy: PolicyName) -> RouterConfig:
    """The router that stands where `diptych serve` would."""
    server = config.server
    return RouterConfig(
        host=server.host,
        port=server.port,
        policy=policy,
        api_key=server.api_key,
        drain_timeout=server.drain_timeout,
        max_body_size=server.max_body_size,
        log_level=server.log_level,
        log_requests=server.log_requests,
    )


def engine_configs(
    config: EngineConfig,
    *,
    num_prefill: int,
    num_decode: int,
    prefill_tp: int | None = None,
    decode_tp: int | None = None,
) -> list[tuple[str, Role, EngineConfig]]:
    """Name, role and configuration of each engine: free ports on loopback, and its share of the machine."""
    parallel = {
        Role.PREFILL: replace(config.parallel, tp_size=prefill_tp or config.parallel.tp_size),
        Role.DECODE: replace(config.parallel, tp_size=decode_tp or config.parallel.tp_size),
    }
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    num_ranks = sum(parallel[role].world_size for role in roles)
    cores = len(os.sched_getaffinity(0))
    shared = replace(
        config,
        model=replace(config.model, num_threads=config.model.num_threads or max(1, cores // num_ranks)),
        cache=replace(config.cache, mem_sharers=len(roles)),
        server=replace(config.server, host=_LOOPBACK, port=0),
        transfer=replace(
            config.transfer,
            disaggregation_bootstrap_port=0,
            allowed_bootstrap_hosts=f"{config.transfer.allowed_bootstrap_hosts},{_LOOPBACK}",
        ),
    )
    found = []
    for index, role in enumerate(roles):
        number = index if role is Role.PREFILL else index - num_prefill
        transfer = replace(shared.transfer, role=role.value)
        found.append((f"{role.value}-{number}", role, replace(shared, parallel=parallel[role], transfer=transfer)))
    return found
