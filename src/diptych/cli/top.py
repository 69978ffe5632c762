"""`diptych top [URL ...]`: engines live in the terminal, as /v1/loads of engines or of a router reports them.

Reads only; what an engine does not report stays empty.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from diptych import env
from diptych.cli.flags import parse_flags
from diptych.errors import ConfigError
from diptych.router.config import DEFAULT_ROUTER_PORT, RouterConfig, engine_address
from diptych.router.upstream import EngineFailed, ErrorStatus, Upstream

DESCRIPTION = (
    "Show engines live: role, requests, queues, KV pool, tokens and transfers a second. A router's URL shows all."
)
_TIMEOUT_S = 2.0
_PATH = "/v1/loads?include=core,disagg,queues,memory"
# Queues of prefill and decode apart, in the order in which a request meets them; shown as "3+1".
_QUEUES = (
    "prefill_bootstrap_queue_reqs",
    "prefill_inflight_queue_reqs",
    "decode_prealloc_queue_reqs",
    "decode_transfer_queue_reqs",
)
_HEADS = ("run", "wait", "queues", "KV", "tok/s", "GB/s", "ms")
_COLORS = {"healthy": "green", "suspect": "yellow", "joining": "cyan", "draining": "yellow", "down": "red", "": "red"}


@dataclass(frozen=True, kw_only=True)
class TopFlags:
    """The flags of `diptych top`."""

    urls: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[URL ...]", help_behavior_hint="")
    ] = (f"http://127.0.0.1:{DEFAULT_ROUTER_PORT}",)
    """Routers or engines; default: the router of this machine."""
    interval: float = 1.0
    """Seconds between two looks."""
    once: bool = False
    """Print one table and end."""
    api_key: str | None = None
    """Bearer token; default: DIPTYCH_API_KEY."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One rank of one engine. None: not reported. kv_usage: 0 to 1. queues: by the names in `_QUEUES`."""

    url: str
    role: str
    state: str
    running: float | None = None
    waiting: float | None = None
    queues: Mapping[str, float]
    kv_usage: float | None = None
    tokens_per_s: float | None = None
    gb_per_s: float | None = None
    transfer_ms: float | None = None


def run(arguments: Sequence[str]) -> int:
    """Show until Ctrl-C; returns the exit status. Raises: ConfigError."""
    flags = parse_flags(TopFlags, arguments, prog="diptych top", description=DESCRIPTION)
    if not 0.1 <= flags.interval <= 3600:
        raise ConfigError(f"--interval must be from 0.1 to 3600 seconds, got {flags.interval}")
    urls = [engine_address(url).url for url in flags.urls]
    config = RouterConfig(api_key=flags.api_key or env.api_key())
    if flags.once:
        rows = asyncio.run(_look_once(urls, config))
        Console().print(screen(rows))
        return 0 if any(row.state != "down" for row in rows) else 1
    asyncio.run(_watch(urls, config, flags.interval))
    return 0


async def _look_once(urls: Sequence[str], config: RouterConfig) -> list[EngineRow]:
    async with Upstream(config) as upstream:
        return await look(upstream, urls)


async def _watch(urls: Sequence[str], config: RouterConfig, interval_s: float) -> None:
    with Live(Text("connecting ..."), auto_refresh=False, screen=True) as live:
        async with Upstream(config) as upstream:
            while True:
                live.update(screen(await look(upstream, urls)), refresh=True)
                await asyncio.sleep(interval_s)


async def look(upstream: Upstream, urls: Sequence[str]) -> list[EngineRow]:
    """Every engine at or behind these URLs; one that does not answer is a row too."""

    async def one(url: str) -> list[EngineRow]:
        try:
            return rows_of(url, await upstream.ask_json(url + _PATH, timeout_s=_TIMEOUT_S))
        except (EngineFailed, ErrorStatus):
            return [EngineRow(url=url, role="", state="down", queues={})]

    return [row for rows in await asyncio.gather(*map(one, urls)) for row in rows]


def rows_of(url: str, report: Any) -> list[EngineRow]:
    """The rows of one /v1/loads, whatever is missing or strange in it. url: of whom it was asked."""
    entries = report.get("loads") if isinstance(report, dict) else None
    return [_row(url, entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _row(url: str, entry: dict[str, Any]) -> EngineRow:
    apart = entry.get("disaggregation")
    apart = apart if isinstance(apart, dict) else {}
    mode = apart.get("mode")
    mode = mode if mode in ("prefill", "decode") else "unified"
    return EngineRow(
        url=str(entry.get("worker", url)),
        role=str(entry.get("role") or mode),
        state=str(entry.get("state", "healthy")),
        running=_number(entry, "num_running_reqs"),
        waiting=_number(entry, "num_waiting_reqs"),
        queues={name: count for name in _QUEUES if (count := _number(apart, name)) is not None},
        kv_usage=_number(entry, "token_usage"),
        tokens_per_s=_number(entry, "gen_throughput"),
        gb_per_s=_number(apart, "kv_transfer_speed_gb_s"),
        transfer_ms=_number(apart, "kv_transfer_latency_ms"),
    )


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def screen(rows: Sequence[EngineRow]) -> Group:
    """What the terminal shows; columns that no engine reports are left out."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("engine", overflow="fold")
    table.add_column("role")
    table.add_column("state")
    figures = [_figures(row) for row in rows]
    heads = [head for head in _HEADS if any(row[head] for row in figures)]
    for head in heads:
        table.add_column(head, justify="right")
    for row, texts in zip(rows, figures, strict=True):
        color = _COLORS.get(row.state, "yellow")
        url = escape(row.url.removeprefix("http://"))
        table.add_row(url, escape(row.role), f"[{color}]{escape(row.state)}[/]", *(texts[head] for head in heads))
    return Group(Text(_headline(rows)), table)


def _figures(row: EngineRow) -> dict[str, str]:
    texts = [
        _shown(row.running),
        _shown(row.waiting),
        "+".join(f"{count:.0f}" for count in row.queues.values()),
        "" if row.kv_usage is None else f"{row.kv_usage:.0%}",
        _shown(row.tokens_per_s, 1),
        _shown(row.gb_per_s, 2),
        _shown(row.transfer_ms, 1),
    ]
    return dict(zip(_HEADS, texts, strict=True))


def _shown(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _headline(rows: Sequence[EngineRow]) -> str:
    def total(values: Iterable[float | None]) -> float:
        return sum(value for value in values if value is not None)

    running, waiting = total(row.running for row in rows), total(row.waiting for row in rows)
    speed = total(row.tokens_per_s for row in rows)
    clock = time.strftime("%H:%M:%S")
    return f"{clock}  {len(rows)} engines  {running:,.0f} running  {waiting:,.0f} waiting  {speed:,.1f} tok/s"
