"""`diptych bench pd`: what prefill and decode apart cost a client on this machine, against one engine that does both.

Starts an engine of each role and a router as child processes, on the same number of threads each, and measures them in
turn. Owns the processes and the table; `diptych.bench.apart` measures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from diptych.bench.apart import GOAL_S, Door, Row, measure
from diptych.bench.measure import Distribution
from diptych.bench.report import host_description
from diptych.bench.serve import ServeOptions, describe_server, open_session, vocabulary_of
from diptych.cli.flags import EngineFlags, parse_engine_flags
from diptych.cli.pd import engine_configs
from diptych.cli.pd_cluster import ENGINE_PROGRAM, EngineChild, EnginePlan
from diptych.config import EngineConfig
from diptych.errors import ConfigError, Unavailable
from diptych.lifetime import die_with_parent
from diptych.log import setup_logging
from diptych.resolve import resolve
from diptych.router.config import Role, RouterConfig
from diptych.router.upstream import EngineFailed, ErrorStatus, Upstream

DESCRIPTION = (
    "Time to first token and between tokens, prefill and decode apart against one engine. Starts all of them on this "
    "machine, with the flags of `diptych serve`, and sends them prompts in turn."
)
UNIFIED, APART, UNROUTED = "unified", "apart", "apart, no router"
ROUTER_START_S = 30.0
REQUEST_TIMEOUT_S = 60.0
NUM_ENGINES = 3


@dataclass(frozen=True, kw_only=True)
class BenchPdFlags(EngineFlags):
    """What to measure."""

    input_lens: str = "16,128,512,1024,2048"
    """Prompt lengths, in tokens."""
    num_prompts: int = 15
    """Prompts of each length, to each."""
    output_len: int = 16
    """Tokens of each answer."""
    json: Path | None = None
    """Write everything to this file."""


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the processes listen. bootstrap_port: of the prefill engine's registry."""

    unified: str
    prefill: str
    decode: str
    router: str
    bootstrap_port: int


def run(arguments: Sequence[str]) -> int:
    """Measure and print. Returns 1 if a request failed."""
    flags = parse_engine_flags(BenchPdFlags, arguments, prog="diptych bench pd", description=DESCRIPTION)
    input_lens = _lengths(flags.input_lens)
    if flags.num_prompts < 1 or flags.output_len < 3:
        raise ConfigError("--num-prompts must be at least 1 and --output-len at least 3")
    setup_logging("bench", flags.engine.server.log_level)
    quiet = replace(flags.engine.server, log_requests=False, log_level="warning")
    config = resolve(replace(flags.engine, server=quiet))
    rows = asyncio.run(_measure(config, input_lens, flags))
    _print_table(rows, config)
    if flags.json is not None:
        flags.json.write_bytes(orjson.dumps(_document(rows), option=orjson.OPT_INDENT_2))
    failures = [failure for row in rows for failure in row.failures]
    for failure in sorted(set(failures)):
        print(f"failed: {failure}")
    return 1 if failures else 0


def _lengths(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--input-lens must be lengths such as 16,512, got {text!r}")
    return [int(part) for part in parts]


async def _measure(config: EngineConfig, input_lens: Sequence[int], flags: BenchPdFlags) -> list[Row]:
    async with _running(config) as where:
        options = ServeOptions(url=where.unified, timeout_s=REQUEST_TIMEOUT_S)
        async with open_session(options) as session:
            server = await describe_server(session)
        own = {"bootstrap_host": "127.0.0.1", "bootstrap_port": where.bootstrap_port}
        options = replace(options, model=server.models[0])
        doors = [
            Door(name=UNIFIED, options=options),
            Door(name=APART, options=replace(options, url=where.router)),
            Door(name=UNROUTED, options=replace(options, url=where.decode, extra=own)),
        ]
        return await measure(
            doors,
            input_lens,
            prefill_url=where.prefill,
            vocabulary=vocabulary_of(server, None),
            num_prompts=flags.num_prompts,
            output_len=flags.output_len,
            seed=config.model.seed,
        )


@asynccontextmanager
async def _running(config: EngineConfig) -> AsyncIterator[Addresses]:
    """An engine of each role, and a router before two of them."""
    children: list[EngineChild] = []
    try:
        for plan in _plans(config):
            children.append(await EngineChild.start(plan, ENGINE_PROGRAM))
        ports = [(await child.ready).port for child in children]
        unified, prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
        async with _router(prefill, decode) as router:
            yield Addresses(
                unified=unified,
                prefill=prefill,
                decode=decode,
                router=router,
                bootstrap_port=await _bootstrap_port(prefill),
            )
    finally:
        for child in children:
            child.terminate()
        await asyncio.gather(*(child.ended for child in children))
        await asyncio.gather(*(child.close() for child in children))


def _plans(config: EngineConfig) -> list[EnginePlan]:
    """Three engines that share the memory; each has the threads that `diptych pd` would give it."""
    (_, _, prefill), (_, _, decode) = engine_configs(config, num_prefill=1, num_decode=1)
    unified = replace(prefill, transfer=replace(prefill.transfer, role="unified"))
    engines = {"unified": (Role.UNIFIED, unified), "prefill": (Role.PREFILL, prefill), "decode": (Role.DECODE, decode)}
    return [
        EnginePlan(name=name, role=role, config=replace(one, cache=replace(one.cache, mem_sharers=NUM_ENGINES)))
        for name, (role, one) in engines.items()
    ]


@asynccontextmanager
async def _router(prefill: str, decode: str) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "diptych", "route", "--prefill", prefill, "--decode", decode]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--port",
        str(port),
        "--log-level",
        "warning",
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent(os.getpid()),
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await _wait_until_ready(url)
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _wait_until_ready(url: str) -> None:
    async with Upstream(RouterConfig()) as upstream, asyncio.timeout(ROUTER_START_S):
        while True:
            try:
                await upstream.ask("GET", url + "/ready", timeout_s=1.0)
                return
            except (EngineFailed, ErrorStatus):
                await asyncio.sleep(0.1)


async def _bootstrap_port(prefill: str) -> int:
    async with Upstream(RouterConfig()) as upstream:
        port = (await upstream.ask_json(prefill + "/server_info", timeout_s=5.0)).get("disaggregation_bootstrap_port")
    if not isinstance(port, int):
        raise Unavailable("the prefill engine has no registry")
    return port


def _print_table(rows: Sequence[Row], config: EngineConfig) -> None:
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    first = _table("prompt", "unified", "p90", "apart", "p90", "adds", "may add", "unrouted adds", "MB")
    gaps = _table("prompt", "unified", "p90", "apart", "p90", "later: unified", "p90", "apart", "p90")
    for row in rows:
        first.add_row(
            str(row.input_len),
            *_pair(row.ttft_ms(UNIFIED)),
            *_pair(row.ttft_ms(APART)),
            f"{row.added_ms(APART, UNIFIED):+.2f}",
            f"{row.allowed_ms:.2f}",
            f"{row.added_ms(UNROUTED, UNIFIED):+.2f}",
            f"{row.moved_nbytes / 1e6:.2f}",
        )
        second, later = [row.second_ms(door) for door in (UNIFIED, APART)], [row.itl_ms(d) for d in (UNIFIED, APART)]
        gaps.add_row(str(row.input_len), *(cell for found in (*second, *later) for cell in _pair(found)))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{config.model.model_path}, {config.model.num_threads or 'all'} threads; load average {load}")
    console.print(f"\ntime to first token, ms, medians; apart may add {1e3 * GOAL_S:g} ms + the time its bytes take")
    console.print(first)
    console.print("\nfrom the first token to the second, and between later ones, ms")
    console.print(gaps)


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _pair(found: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found.p50:.2f}", f"{found.p90:.2f}")


def _document(rows: Sequence[Row]) -> dict[str, object]:
    return {"format": 1, "host": host_description(), "rows": [_row_document(row) for row in rows]}


def _row_document(row: Row) -> dict[str, object]:
    doors = {}
    for name, records in row.records.items():
        named = {"ttft_ms": row.ttft_ms(name), "second_ms": row.second_ms(name), "itl_ms": row.itl_ms(name)}
        figures = {key: None if value is None else dataclasses.asdict(value) for key, value in named.items()}
        doors[name] = {
            **figures,
            "added_ms": row.added_ms(name, UNIFIED),
            "failures": [r.error for r in records if r.error],
        }
    return {
        "input_len": row.input_len,
        "doors": doors,
        "moved_nbytes": row.moved_nbytes,
        "allowed_ms": row.allowed_ms,
    }
