"""Shows what was measured: tables for a terminal, one JSON document for programs, and which machine it was.

Knows nothing of how it was measured.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import diptych
from diptych.bench.measure import CaseResult, Distribution, EngineTotals, Latencies, RequestRecord, Round
from diptych.bench.workload import Case, Headline
from diptych.errors import ConfigError

_PACKAGES = ("torch", "numpy", "flashinfer-python", "triton", "aiohttp")
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
_PIPE_WIDTH = 140
_MISSING = "-"


def host_description() -> dict[str, Any]:
    """Processor, memory, GPUs and versions of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "load_average": list(os.getloadavg()),
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def _gpus() -> list[str]:
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def document(results: Sequence[CaseResult], about: dict[str, Any], *, with_requests: bool = False) -> dict[str, Any]:
    """Everything as plain data. Times are in seconds, rates in tokens a second.

    Args: about: what was run: command, configuration, workload. with_requests: also a row for every request.
    """
    return {
        "format": 1,
        "version": diptych.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": host_description(),
        **about,
        "cases": [_case_document(result, with_requests=with_requests) for result in results],
    }


def _case_document(result: CaseResult, *, with_requests: bool) -> dict[str, Any]:
    latencies = Latencies.of(result.completed)
    return {
        "name": result.case.name,
        "headline": {
            "figure": str(result.case.headline),
            "median": result.median(result.case.headline),
            "best": result.best(),
        },
        "failures": dict(result.failures),
        "latencies_s": dataclasses.asdict(latencies),
        "rounds": [_round_document(item, with_requests=with_requests) for item in result.rounds],
    }


def _round_document(item: Round, *, with_requests: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        "num_requests": len(item.records),
        "num_completed": len(item.completed),
        "duration_s": item.duration_s,
        "num_prompt_tokens": item.num_prompt_tokens,
        "num_output_tokens": item.num_output_tokens,
        "cached_tokens": item.cached_tokens,
        "requests_per_s": item.request_rate,
        "input_tokens_per_s": item.input_rate,
        "output_tokens_per_s": item.output_rate,
        "decode_tokens_per_s": item.decode_rate,
        "ms_per_token": item.ms_per_token,
        "engine": None if item.engine is None else _engine_document(item.engine),
    }
    if with_requests:
        content["requests"] = [_request_document(record) for record in item.records]
    return content


def _engine_document(totals: EngineTotals) -> dict[str, Any]:
    return {
        **totals._asdict(),
        "host_ms_per_step": totals.host_ms_per_step,
        "compute_ms_per_step": totals.compute_ms_per_step,
        "accept_length": totals.accept_length,
        "accept_rate": totals.accept_rate,
    }


def _request_document(record: RequestRecord) -> dict[str, Any]:
    return {
        "started_s": record.started_s,
        "ttft_s": record.ttft_s,
        "e2e_s": record.e2e_s,
        "queue_s": record.queue_s,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "cached_tokens": record.cached_tokens,
        "itl_s": record.itl_s,
        "error": record.error,
    }


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write the document. Raises: ConfigError if the file cannot be written."""
    try:
        path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def print_report(results: Sequence[CaseResult], notes: Iterable[str], console: Console | None = None) -> None:
    """The tables: throughput of every case, then latencies, then what failed. notes: lines to end with."""
    console = Console(highlight=False) if console is None else console
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    console.print(_throughput_table(results))
    for result in results:
        console.print(_latency_table(result) if len(results) == 1 else "", end="")
    if len(results) > 1:
        console.print(_short_latency_table(results))
    if any(result.engine() for result in results):
        console.print(_engine_table(results))
    for result in results:
        for cause, count in result.failures.most_common():
            console.print(f"[red]{result.case.name}: {count} failed: {escape(cause)}[/]", soft_wrap=True)
    for note in notes:
        console.print(escape(note), soft_wrap=True)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _throughput_table(results: Sequence[CaseResult]) -> Table:
    """Medians over the rounds; the headline figure of each case in bold, with its best round."""
    columns = ("case", "rounds", "requests", "done", "seconds", *map(str, Headline), "best")
    table = _table("Throughput (median round)", columns)
    for result in results:
        case = result.case
        seconds = Distribution.of(item.duration_s for item in result.rounds)
        table.add_row(
            case.name,
            str(len(result.rounds)),
            str(len(result.records)),
            str(len(result.completed)),
            _number(None if seconds is None else seconds.p50),
            *(_figure(result.median(headline), case, headline) for headline in Headline),
            _number(result.best()),
        )
    return table


def _figure(value: float | None, case: Case, headline: Headline) -> str:
    text = _number(value)
    return f"[bold]{text}[/]" if headline is case.headline else text


def _latency_table(result: CaseResult) -> Table:
    table = _table("Latency (ms)", ("", "mean", "p50", "p90", "p99", "max"))
    latencies = Latencies.of(result.completed)
    rows = (
        ("time to first token", latencies.ttft),
        ("inter-token latency", latencies.itl),
        ("time per output token", latencies.tpot),
        ("end to end", latencies.e2e),
        ("queue", latencies.queue),
    )
    for name, distribution in rows:
        if distribution is not None:
            values = (distribution.mean, distribution.p50, distribution.p90, distribution.p99, distribution.max)
            table.add_row(name, *(_number(1000.0 * value) for value in values))
    return table


def _short_latency_table(results: Sequence[CaseResult]) -> Table:
    columns = ("case", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "e2e p50", "p99")
    table = _table("Latency (ms)", columns)
    for result in results:
        latencies = Latencies.of(result.completed)
        e2e = _percentiles(latencies.e2e)
        table.add_row(result.case.name, *_percentiles(latencies.ttft), *_percentiles(latencies.itl), e2e[0], e2e[2])
    return table


def _percentiles(distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return [_MISSING] * 3
    return [_number(1000.0 * value) for value in (distribution.p50, distribution.p90, distribution.p99)]


def _engine_table(results: Sequence[CaseResult]) -> Table:
    columns = ("case", "steps", "host ms/step", "compute ms/step", "cached tokens", "retractions", "accept length")
    table = _table("Engine", columns)
    for result in results:
        totals = result.engine()
        if totals is not None:
            table.add_row(
                result.case.name,
                f"{totals.steps:,.0f}",
                _number(totals.host_ms_per_step),
                _number(totals.compute_ms_per_step),
                f"{totals.cached_tokens:,.0f}",
                f"{totals.retractions:,.0f}",
                _number(totals.accept_length),
            )
    return table


def _number(value: float | None) -> str:
    """Three or four digits that matter, whatever the size."""
    if value is None:
        return _MISSING
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
