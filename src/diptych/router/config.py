"""What a user can set on a router, and which engines it starts with."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal
from urllib.parse import urlsplit

from diptych import env
from diptych.errors import ConfigError
from diptych.resolve import parse_size

DEFAULT_ROUTER_PORT = 30080
DEFAULT_BOOTSTRAP_PORT = 8998
MAX_ADDED_DELAY_S = 2.0
FIRST_PAUSE_S = 0.05
# As the field of RouterConfig; `policy.POLICIES` says what each does.
PolicyName = Literal["round_robin", "random", "least_loaded", "prefix_aware"]


class Role(StrEnum):
    """What an engine advertises. A unified engine does both; a prefill engine takes no client's request by itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """One engine as it was named. role, bootstrap_port: None means that the engine is asked."""

    url: str
    role: Role | None = None
    bootstrap_port: int | None = None

    @property
    def bootstrap_host(self) -> str:
        """Where decode engines find a prefill engine: the host of its URL."""
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = DEFAULT_ROUTER_PORT
    """Port to listen on; 0 takes a free one."""
    policy: PolicyName = "least_loaded"
    """Which engine gets a request; with prefill and decode apart it chooses each of the pair."""
    local_prefill_tokens: int = 0
    """Prompts with fewer new tokens than this (estimated) go to a decode engine alone; 0: none do."""
    learn_local_prefill: bool = False
    """Learn from times to first token which short prompts decode engines serve faster alone."""
    api_key: str | None = None
    """Bearer token that clients must send; health and metrics stay open."""
    admin_api_key: str | None = None
    """Bearer token for /workers; default: --api-key. Beyond loopback one of the two must be set to use it."""
    engine_api_key: str | None = None
    """Bearer token sent to engines; default: what the client sent, and --api-key for the router's own questions."""
    max_attempts: int = 3
    """Engines (or pairs) tried for one request, as long as nothing has reached the client."""
    connect_timeout: float = 0.5
    """Seconds to get a connection to an engine."""
    health_interval: float = 1.0
    """Seconds between two looks at an engine."""
    health_timeout: float = 0.75
    """Seconds that /health may take."""
    health_failures: int = 2
    """Failures in a row after which an engine is down."""
    breaker_failures: int = 5
    """Failed requests in a row after which an engine that looks healthy gets none for a while."""
    breaker_pause: float = 5.0
    """Seconds of that while; doubled each time, up to a minute."""
    max_active_requests: int = 4096
    """Requests open at once, beyond which new ones get 503."""
    drain_timeout: float = 30.0
    """Seconds that open requests get to finish after SIGTERM."""
    max_body_size: str = "32MiB"
    """Largest HTTP body accepted."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Verbosity of the log on standard error."""
    log_requests: bool = True
    """One line a finished request."""
    engines: tuple[EngineAddress, ...] = field(default=())
    """The engines to begin with."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the router."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def max_body_nbytes(self) -> int:
        """`max_body_size` in bytes."""
        return parse_size(self.max_body_size, name="max_body_size")

    @property
    def added_delay_s(self) -> float:
        """What retries can add to a request at most: connections that time out, and the pauses between attempts."""
        pauses = sum(pause_s(attempt) for attempt in range(1, self.max_attempts))
        return (self.max_attempts - 1) * self.connect_timeout + pauses


def pause_s(attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt`, from 1 on."""
    return FIRST_PAUSE_S * 2.0 ** (attempt - 1)


def resolve_router(config: RouterConfig) -> RouterConfig:
    """The same config, checked, with the API key of the environment. Raises: ConfigError naming the first bad value."""
    _validate(config)
    if config.api_key is None:
        return replace(config, api_key=env.api_key())
    return config


def _validate(config: RouterConfig) -> None:
    if not config.host:
        raise ConfigError('host must be an address such as "127.0.0.1", got an empty string')
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"port must be from 0 to 65535, got {config.port}")
    for name in ("api_key", "admin_api_key", "engine_api_key"):
        if vars(config)[name] == "":
            raise ConfigError(f"{name} must not be empty; leave it out to do without one")
    for name in ("max_attempts", "health_failures", "breaker_failures", "max_active_requests"):
        if vars(config)[name] < 1:
            raise ConfigError(f"{name} must be at least 1, got {vars(config)[name]}")
    for name in ("connect_timeout", "health_interval", "health_timeout", "breaker_pause"):
        if not 0.0 < vars(config)[name] < math.inf:
            raise ConfigError(f"{name} must be above 0 seconds, got {vars(config)[name]}")
    if config.local_prefill_tokens < 0:
        raise ConfigError(f"local_prefill_tokens must be 0 or more, got {config.local_prefill_tokens}")
    if not 0.0 <= config.drain_timeout < math.inf:
        raise ConfigError(f"drain_timeout must be 0 or more seconds, got {config.drain_timeout}")
    if config.added_delay_s >= MAX_ADDED_DELAY_S:
        raise ConfigError(
            f"max_attempts {config.max_attempts} and connect_timeout {config.connect_timeout} could delay a request by "
            f"{config.added_delay_s:.2f} s; lower one until it stays below {MAX_ADDED_DELAY_S:g} s"
        )
    parse_size(config.max_body_size, name="max_body_size")
    _refuse_doubles(config.engines)


def _refuse_doubles(engines: Sequence[EngineAddress]) -> None:
    seen: set[str] = set()
    for engine in engines:
        if engine.url in seen:
            raise ConfigError(f"engine {engine.url} is named twice; name each once, with one role")
        seen.add(engine.url)


def engine_address(url: str, role: Role | None = None, bootstrap_port: int | None = None) -> EngineAddress:
    """An engine from what a person or program wrote: scheme and host are checked, the path's end is trimmed.

    Raises: ConfigError naming what is wrong.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        has_host = parts.hostname is not None and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"an engine must be a URL such as http://127.0.0.1:30000, got {url!r}")
    if bootstrap_port is not None and not 1 <= bootstrap_port <= 65535:
        raise ConfigError(f"the bootstrap port of {url} must be from 1 to 65535, got {bootstrap_port}")
    return EngineAddress(url=text.rstrip("/"), role=role, bootstrap_port=bootstrap_port)
