"""Checks a whole EngineConfig and decides what the host side can: sizes, paths, names. Once, before anything starts.

What needs the device (dtype, KV pool size, threads, token budget) is decided in the worker. Never imports torch.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import msgspec

from diptych import env
from diptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    TransferConfig,
)
from diptych.demo import DEMO_NAME, demo_model_path
from diptych.errors import ConfigError
from diptych.lora_paths import parse_lora_paths
from diptych.parallel.mesh import MeshSizes, Placement, place

logger = logging.getLogger(__name__)

MAX_PAGE_SIZE = 256
DEFAULT_TOKEN_BUDGET = {"cpu": 1024, "cuda": 8192}
DEFAULT_NUM_SEQS = {"cpu": 64, "cuda": 512}

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def parse_size(text: str, *, name: str = "size") -> int:
    """Bytes of a size such as "2GiB", "500 MB", "64k" or "1048576".

    KB, MB, GB are powers of ten; KiB, MiB, GiB and the bare letters K, M, G powers of two.
    Raises: ConfigError naming `name` for anything else, and for sizes below one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise ConfigError(f'{name} must be a size such as "512MiB" or "2GiB", got {text!r}')
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ConfigError(f"{name} must be at least one byte, got {text!r}")
    return size


def token_budget(config: SchedulerConfig, device_type: str) -> int:
    """Tokens of a step at most, on a device that is known by now."""
    return config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET[device_type]


def max_num_seqs(config: SchedulerConfig, device_type: str) -> int:
    """Sequences in a batch at most, on a device that is known by now."""
    return config.max_num_seqs or DEFAULT_NUM_SEQS[device_type]


def resolve(config: EngineConfig) -> EngineConfig:
    """The same config, checked, with the model's and the tokenizer's paths, the served name and keys filled in.

    Assembles the demo model if that is what is asked for. Resolving twice changes nothing.
    Raises: ConfigError naming the first value that cannot be served.
    """
    if config.transfer.cluster_key is None:
        config = replace(config, transfer=replace(config.transfer, cluster_key=env.cluster_key()))
    validate(config)
    parallel = _resolve_parallel(config)
    model = _resolve_paths(config.model)
    server = config.server
    if server.served_model_name is None:
        server = replace(server, served_model_name=_model_name(config.model.model_path))
    if server.api_key is None:
        server = replace(server, api_key=env.api_key())
    if server.api_key is None and not _is_loopback(server.host):
        logger.warning("listening on %s without an API key: anyone who reaches the port can use the model", server.host)
    speculative = config.speculative
    if speculative.speculative_draft_model_path == DEMO_NAME:
        speculative = replace(speculative, speculative_draft_model_path=str(demo_model_path()))
    # Adapters do not go together with data-parallel groups: no place for any.
    lora = config.lora if parallel.dp_size == 1 else replace(config.lora, max_loras=0)
    return replace(config, model=model, parallel=parallel, lora=lora, speculative=speculative, server=server)


def validate(config: EngineConfig) -> None:
    """Check types, choices and ranges without touching the file system. Raises: ConfigError."""
    try:
        msgspec.convert(msgspec.to_builtins(config), EngineConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"invalid configuration: {error}") from error
    _validate_model(config.model)
    _validate_cache(config.cache)
    _validate_scheduler(config.scheduler)
    _validate_parallel(config)
    _validate_speculative(config)
    _at_least("max_loras", config.lora.max_loras, 0)
    _at_least("max_lora_rank", config.lora.max_lora_rank, 1)
    parse_lora_paths(config.lora.lora_paths)
    _validate_transfer(config.transfer)
    _validate_server(config.server)


def _validate_model(config: ModelConfig) -> None:
    if not config.model_path:
        raise ConfigError('model_path must name a folder, a GGUF file or "demo", got an empty string')
    _at_least("max_model_len", config.max_model_len, 2)
    _at_least("num_threads", config.num_threads, 1)


def _validate_cache(config: CacheConfig) -> None:
    size = config.page_size
    if not 1 <= size <= MAX_PAGE_SIZE or size & (size - 1):
        raise ConfigError(f"page_size must be a power of two from 1 to {MAX_PAGE_SIZE}, got {size}")
    if config.mem_fraction is not None and not 0.0 < config.mem_fraction <= 1.0:
        raise ConfigError(f"mem_fraction must be above 0 and at most 1, got {config.mem_fraction}")
    _at_least("mem_sharers", config.mem_sharers, 1)
    if config.kv_cache_memory is not None:
        parse_size(config.kv_cache_memory, name="kv_cache_memory")


def _validate_scheduler(config: SchedulerConfig) -> None:
    _at_least("max_num_seqs", config.max_num_seqs, 1)
    _at_least("max_num_batched_tokens", config.max_num_batched_tokens, 1)
    _at_least("max_inflight_steps", config.max_inflight_steps, 1)
    _at_least("max_queued_requests", config.max_queued_requests, 1)
    if config.request_timeout is not None and not config.request_timeout > 0:
        raise ConfigError(f"request_timeout must be above 0 seconds, got {config.request_timeout}")


def mesh_sizes(config: ParallelConfig) -> MeshSizes:
    """How many ways each axis divides the work. Raises: ConfigError."""
    return MeshSizes(tp=config.tp_size, pp=config.pp_size, dp=config.dp_size, ep=config.ep_size)


def data_parallel_ranks(config: ParallelConfig) -> list[list[int]]:
    """The ranks that work on the same sequences, of every stage, for each data-parallel group."""
    group_size = config.tp_size // config.dp_size
    return [
        [rank for rank in range(config.world_size) if rank % config.tp_size // group_size == group]
        for group in range(config.dp_size)
    ]


def placement(config: ParallelConfig) -> Placement:
    """On which node each rank runs. Args: config: resolved."""
    return Placement(
        world=config.world_size,
        nnodes=config.nnodes or 1,
        node_rank=config.node_rank or 0,
        init_addr=config.dist_init_addr,
    )


def _validate_parallel(config: EngineConfig) -> None:
    parallel = config.parallel
    mesh_sizes(parallel)
    if not 1.0 <= parallel.dist_timeout < float("inf"):
        raise ConfigError(f"dist_timeout must be at least 1 second, got {parallel.dist_timeout}")
    if parallel.dp_size > 1:
        _validate_groups(config)


def _validate_groups(config: EngineConfig) -> None:
    """What does not go together with data-parallel groups."""
    size, depth = config.parallel.dp_size, config.scheduler.max_inflight_steps
    if config.parallel.pp_size > 1:
        raise ConfigError(f"dp_size {size} with pp_size {config.parallel.pp_size} is not served; use one or the other")
    if config.speculative.is_on:
        raise ConfigError(f"speculation with dp_size {size} is not served; use dp_size 1")
    if config.lora.lora_paths:
        raise ConfigError(f"adapters with dp_size {size} are not served; use dp_size 1")
    if depth not in (None, 1):
        raise ConfigError(f"max_inflight_steps is {depth}, but dp_size {size} takes one step at a time; leave it out")


def _resolve_parallel(config: EngineConfig) -> ParallelConfig:
    """The same, with what LeaderWorkerSet's variables say filled in. Raises: ConfigError."""
    parallel = config.parallel
    where = place(
        parallel.world_size,
        nnodes=parallel.nnodes,
        node_rank=parallel.node_rank,
        init_addr=parallel.dist_init_addr,
        group=env.leader_worker_set(),
    )
    if where.nnodes > 1:
        host = _host_of(where.init_addr or "")
        if config.transfer.cluster_key is None and not _is_loopback(host):
            raise ConfigError(
                f"dist_init_addr names {host}, which others can reach: set --cluster-key (or DIPTYCH_CLUSTER_KEY), the "
                "same on all nodes"
            )
    return replace(parallel, nnodes=where.nnodes, node_rank=where.node_rank, dist_init_addr=where.init_addr)


def _host_of(address: str) -> str:
    """The host of "host:port". Raises: ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 1 <= int(port) < 65535):
        raise ConfigError(f"dist_init_addr must be host:port, with a port from 1 to 65534, got {address!r}")
    return host.removeprefix("[").removesuffix("]")


def _validate_speculative(config: EngineConfig) -> None:
    speculative, depth = config.speculative, config.scheduler.max_inflight_steps
    _at_least("speculative_num_draft_tokens", speculative.speculative_num_draft_tokens, 1)
    needs_path = speculative.speculative_algorithm in ("STANDALONE", "EAGLE")
    if needs_path != (speculative.speculative_draft_model_path is not None):
        raise ConfigError(
            f"speculative_algorithm {speculative.speculative_algorithm} "
            + ("needs" if needs_path else "has no use for")
            + " a speculative_draft_model_path"
        )
    if not speculative.is_on:
        return
    if depth not in (None, 1):
        raise ConfigError(
            f"max_inflight_steps is {depth}, but how many tokens a step with speculation yields is known only when it "
            "is over; leave it out, or use 1"
        )
    if config.parallel.pp_size > 1:
        raise ConfigError(f"speculation is not served over {config.parallel.pp_size} pipeline stages; use pp_size 1")


def _validate_transfer(config: TransferConfig) -> None:
    for name, port in (
        ("disaggregation_bootstrap_port", config.disaggregation_bootstrap_port),
        ("peer_port", config.peer_port),
    ):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{name} must be from 0 to 65535, got {port}")
    _at_least("max_rooms", config.max_rooms, 1)
    _at_least("local_prefill_tokens", config.local_prefill_tokens, 0)
    for name in ("room_timeout", "transfer_timeout", "heartbeat_interval", "heartbeat_timeout"):
        if not 0.0 < vars(config)[name] < float("inf"):
            raise ConfigError(f"{name} must be above 0 seconds, got {vars(config)[name]}")
    if config.heartbeat_timeout < 2 * config.heartbeat_interval:
        raise ConfigError(
            f"heartbeat_timeout must be at least twice heartbeat_interval ({config.heartbeat_interval} s), "
            f"got {config.heartbeat_timeout}"
        )
    if config.cluster_key == "":
        raise ConfigError("cluster_key must not be empty; leave it out on loopback")
    if config.peer_host in ("0.0.0.0", "::"):
        raise ConfigError(f"peer_host is {config.peer_host}, which no peer can reach: name an address of this host")
    if config.cluster_key is None and not _is_loopback(config.peer_host):
        raise ConfigError(
            f"peer_host is {config.peer_host}, which others can reach: set --cluster-key (or DIPTYCH_CLUSTER_KEY), the "
            "same for all engines, or use a loopback address"
        )


def _validate_server(config: ServerConfig) -> None:
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"port must be from 0 to 65535, got {config.port}")
    if not config.host:
        raise ConfigError('host must be an address such as "127.0.0.1", got an empty string')
    if config.api_key == "":
        raise ConfigError("api_key must not be empty; leave it out to serve without one")
    if not 0.0 <= config.drain_timeout < float("inf"):
        raise ConfigError(f"drain_timeout must be 0 or more seconds, got {config.drain_timeout}")
    parse_size(config.max_body_size, name="max_body_size")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _resolve_paths(config: ModelConfig) -> ModelConfig:
    path = demo_model_path() if config.model_path == DEMO_NAME else Path(config.model_path).expanduser()
    if not path.exists():
        raise ConfigError(
            f'model path {path} does not exist; give a folder with config.json, a GGUF file, or "{DEMO_NAME}"'
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"model folder {path} has no config.json; for GGUF name the .gguf file itself")
    tokenizer_path = config.tokenizer_path
    if tokenizer_path is None:
        found = _find_tokenizer(path, may_lack=config.load_format == "dummy")
        tokenizer_path = None if found is None else str(found)
    elif not Path(tokenizer_path).expanduser().exists():
        raise ConfigError(f"tokenizer path {tokenizer_path} does not exist; give a folder or a tokenizer.json")
    return replace(config, model_path=str(path), tokenizer_path=tokenizer_path)


def _find_tokenizer(path: Path, *, may_lack: bool) -> Path | None:
    """The model folder if it holds a tokenizer.json; for a file the tokenizer.json beside it, else the file itself."""
    if path.is_file():
        beside = path.parent / "tokenizer.json"
        return beside if beside.is_file() else path
    if (path / "tokenizer.json").is_file():
        return path
    if may_lack:
        return None
    raise ConfigError(f"model folder {path} has no tokenizer.json; name one with --tokenizer-path")


def _model_name(model_path: str) -> str:
    if model_path == DEMO_NAME:
        return DEMO_NAME
    path = Path(model_path).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
