"""`diptych top [URL ...]`: engines live in the terminal, as /v1/loads of engines or of a router reports them.

Reads only; what an engine does not report stays empty.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console, Group, RenderableType
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
_HEADS = ("run", "wait", "meet", "send", "land", "KV", "in/s", "out/s", "GB/s", "over", "failed")
_COLORS = {"healthy": "green", "suspect": "yellow", "joining": "cyan", "draining": "yellow", "down": "red", "": "red"}
_LEGEND = (
    "in/s, out/s: tokens a second of prompts and of answers. Rooms of prefill and decode: meet waits for its other "
    "side, send is computed or on its way, land is awaited. GB/s: while pages are written, over what."
)


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
    """Print one table and end; rates are those between two looks."""
    api_key: str | None = None
    """Bearer token; default: DIPTYCH_API_KEY."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One rank of one engine. None: not reported. kv_usage: 0 to 1. meeting, sending, landing: its rooms, by what they
    wait for. prompt_tokens: computed since its start, at second `at_s`; their rate follows from two looks.
    """

    url: str
    role: str
    state: str
    at_s: float
    running: float | None = None
    waiting: float | None = None
    meeting: float | None = None
    sending: float | None = None
    landing: float | None = None
    kv_usage: float | None = None
    tokens_per_s: float | None = None
    prompt_tokens: float | None = None
    gb_per_s: float | None = None
    transport: str = ""
    num_failed: float | None = None

    def prompt_tokens_per_s(self, before: EngineRow | None) -> float | None:
        """Since `before`; None if that cannot be said, as of a decode engine, which counts what others computed."""
        if before is None or self.at_s <= before.at_s or self.role == "decode":
            return None
        now, then = self.prompt_tokens, before.prompt_tokens
        return None if now is None or then is None or now < then else (now - then) / (self.at_s - before.at_s)


def run(arguments: Sequence[str]) -> int:
    """Show until Ctrl-C; returns the exit status. Raises: ConfigError."""
    flags = parse_flags(TopFlags, arguments, prog="diptych top", description=DESCRIPTION)
    if not 0.1 <= flags.interval <= 3600:
        raise ConfigError(f"--interval must be from 0.1 to 3600 seconds, got {flags.interval}")
    urls = [engine_address(url).url for url in flags.urls]
    config = RouterConfig(api_key=flags.api_key or env.api_key())
    if flags.once:
        before, rows = asyncio.run(_look_twice(urls, config, flags.interval))
        Console().print(screen(rows, before))
        return 0 if any(row.state != "down" for row in rows) else 1
    asyncio.run(_watch(urls, config, flags.interval))
    return 0


async def _look_twice(
    urls: Sequence[str], config: RouterConfig, interval_s: float
) -> tuple[list[EngineRow], list[EngineRow]]:
    async with Upstream(config) as upstream:
        before = await look(upstream, urls)
        await asyncio.sleep(interval_s)
        return before, await look(upstream, urls)


async def _watch(urls: Sequence[str], config: RouterConfig, interval_s: float) -> None:
    before: list[EngineRow] = []
    with Live(Text("connecting ..."), auto_refresh=False, screen=True) as live:
        async with Upstream(config) as upstream:
            while True:
                rows = await look(upstream, urls)
                live.update(screen(rows, before), refresh=True)
                before = rows
                await asyncio.sleep(interval_s)


async def look(upstream: Upstream, urls: Sequence[str]) -> list[EngineRow]:
    """Every engine at or behind these URLs; one that does not answer is a row too."""

    async def one(url: str) -> list[EngineRow]:
        try:
            return rows_of(url, await upstream.ask_json(url + _PATH, timeout_s=_TIMEOUT_S))
        except (EngineFailed, ErrorStatus):
            return [EngineRow(url=url, role="", state="down", at_s=time.monotonic())]

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
    failures = apart.get("failures")
    transport = apart.get("transport")
    return EngineRow(
        url=str(entry.get("worker", url)),
        role=str(entry.get("role") or mode),
        state=str(entry.get("state", "healthy")),
        at_s=time.monotonic(),
        running=_number(entry, "num_running_reqs"),
        waiting=_number(entry, "num_waiting_reqs"),
        meeting=_number(apart, "prefill_bootstrap_queue_reqs"),
        sending=_number(apart, "prefill_inflight_queue_reqs"),
        landing=_sum(_number(apart, "decode_prealloc_queue_reqs"), _number(apart, "decode_transfer_queue_reqs")),
        kv_usage=_number(entry, "token_usage"),
        tokens_per_s=_number(entry, "gen_throughput"),
        prompt_tokens=_number(entry, "prompt_tokens"),
        gb_per_s=_number(apart, "kv_transfer_speed_gb_s"),
        transport=transport if isinstance(transport, str) and transport != "unknown" else "",
        num_failed=_failed(failures) if isinstance(failures, dict) else None,
    )


def _failed(failures: dict[str, Any]) -> float:
    """Rooms that ended badly; a client that went away is no failure."""
    return sum(_number(failures, cause) or 0.0 for cause in failures if cause != "CANCELLED")


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def screen(rows: Sequence[EngineRow], before: Sequence[EngineRow] = ()) -> Group:
    """What the terminal shows; columns in which there is nothing are left out. before: an earlier look, for rates."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold")
    for head in ("engine", "role", "state"):
        table.add_column(head, no_wrap=True)
    earlier = {row.url: row for row in before}
    figures = [_figures(row, earlier.get(row.url)) for row in rows]
    heads = [head for head in _HEADS if any(row[head] for row in figures)]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row, texts in zip(rows, figures, strict=True):
        color = _COLORS.get(row.state, "yellow")
        url = escape(row.url.removeprefix("http://"))
        table.add_row(url, escape(row.role), f"[{color}]{escape(row.state)}[/]", *(texts[head] for head in heads))
    parts: list[RenderableType] = [Text(_headline(rows)), Text(), table]
    if {"meet", "send", "land"} & set(heads):
        parts += [Text(), Text(_LEGEND, style="dim")]
    return Group(*parts)


def _figures(row: EngineRow, before: EngineRow | None) -> dict[str, str]:
    texts = [
        _shown(row.running),
        _shown(row.waiting),
        _unless_zero(row.meeting),
        _unless_zero(row.sending),
        _unless_zero(row.landing),
        "" if row.kv_usage is None else f"{row.kv_usage:.0%}",
        _unless_zero(row.prompt_tokens_per_s(before)),
        _unless_zero(row.tokens_per_s),
        _unless_zero(row.gb_per_s, 2),
        escape(row.transport),
        _unless_zero(row.num_failed),
    ]
    return dict(zip(_HEADS, texts, strict=True))


def _unless_zero(value: float | None, digits: int = 0) -> str:
    """A figure that only matters when there is one."""
    return _shown(value, digits) if value else ""


def _shown(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _headline(rows: Sequence[EngineRow]) -> str:
    """Engines that can be used of all; requests, each counted where its answer comes from; the clients' tokens."""
    answering = [row for row in rows if row.role != "prefill"]

    def total(values: Iterable[float | None]) -> float:
        return sum(value for value in values if value is not None)

    num_open = total(value for row in answering for value in (row.running, row.waiting))
    speed = total(row.tokens_per_s for row in answering)
    usable = sum(row.state == "healthy" for row in rows)
    clock = time.strftime("%H:%M:%S")
    return f"{clock}  {usable} of {len(rows)} engines healthy  {num_open:,.0f} requests  {speed:,.0f} tok/s"
