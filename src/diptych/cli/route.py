"""`diptych route`: the router in front of prefill, decode or unified engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from diptych.cli.flags import parse_flags
from diptych.errors import ConfigError
from diptych.log import setup_logging
from diptych.router.config import EngineAddress, Role, RouterConfig, engine_address, resolve_router

logger = logging.getLogger(__name__)

DESCRIPTION = (
    "Route requests to engines. URL: unified engines, or engines that are asked for their role. More can be added and "
    "removed at run time (/workers)."
)
_Group = tuple[str, ...]
_Repeated = Annotated[tuple[_Group, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="URL [PORT]")]


@dataclass(frozen=True, kw_only=True)
class RouteFlags:
    """The flags of `diptych route`."""

    urls: Annotated[_Group, tyro.conf.Positional, tyro.conf.arg(metavar="[URL ...]", help_behavior_hint="")] = ()
    """Engines of any role: each is asked for its own."""
    prefill: _Repeated = ()
    """Prefill engine, with its bootstrap port unless it is to be asked for it."""
    decode: _Repeated = ()
    """Decode engine."""
    router: Annotated[RouterConfig, tyro.conf.arg(name="")] = field(default_factory=RouterConfig)


def run(arguments: Sequence[str]) -> int:
    """Route until SIGTERM or Ctrl-C; returns the exit status. Raises: ConfigError before anything is started."""
    config = parse(arguments)
    setup_logging("router", config.log_level)
    config = resolve_router(config)
    if not config.is_loopback and config.api_key is None:
        logger.warning("listening on %s without an API key: anyone who reaches it can use the engines", config.host)
    # Imported only now: the web framework takes longer to import than --help may take.
    from diptych.router.process import route

    return route(config)


def parse(arguments: Sequence[str]) -> RouterConfig:
    """The configuration that a command line describes. Raises: ConfigError."""
    flags = parse_flags(RouteFlags, arguments, prog="diptych route", description=DESCRIPTION)
    engines = [
        *(engine_address(url) for url in flags.urls),
        *(_engine(group, Role.PREFILL) for group in flags.prefill),
        *(_engine(group, Role.DECODE) for group in flags.decode),
    ]
    return replace(flags.router, engines=tuple(engines))


def _engine(group: _Group, role: Role) -> EngineAddress:
    if len(group) == 1:
        return engine_address(group[0], role)
    if role is Role.PREFILL and len(group) == 2 and group[1].isdigit():
        return engine_address(group[0], role, int(group[1]))
    wanted = "a URL and perhaps its bootstrap port" if role is Role.PREFILL else "one URL; repeat it for more"
    raise ConfigError(f"--{role} takes {wanted}, got {' '.join(group) or 'nothing'}")
