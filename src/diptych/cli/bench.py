"""`diptych bench offline | serve | pd | transfer`: what to measure, from flags; the figures as tables, JSON and a plot.

Each subcommand is imported only when it runs. Owns the flags; `diptych.bench` does the work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from diptych import env
from diptych.bench.measure import CaseResult
from diptych.bench.presets import choose_cases, cpu_cases, h200_cases
from diptych.bench.workload import (
    DEFAULT_NUM_PROMPTS,
    Case,
    LengthRange,
    SyntheticSpec,
    Vocabulary,
    dataset_requests,
    synthetic_requests,
)
from diptych.cli.flags import EngineFlags, parse_engine_flags, parse_flags
from diptych.config import DEFAULT_PORT, EngineConfig
from diptych.errors import ConfigError
from diptych.log import setup_logging

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """What is asked of the engine: a preset, a dataset, or random prompts."""

    preset: Literal["cpu", "h200"] | None = None
    """Fixed cases, comparable over time: the project's CPU table, or the cases for one large GPU."""
    cases: str | None = None
    """Those of the preset to run, such as "single_stream,offline_32"; default: all."""
    dataset: Path | None = None
    """JSONL file; a row has prompt, prompt_token_ids or messages, and may have max_tokens."""
    num_prompts: int | None = None
    """Requests; default: 32, or all rows of the dataset."""
    input_len: str = "512"
    """Prompt tokens, as N or MIN:MAX."""
    output_len: str = "128"
    """Output tokens, as N or MIN:MAX; of a dataset, for rows without max_tokens."""
    shared_prefix_len: int = 0
    """Tokens in front of every prompt that are the same for all, beside --input-len."""
    temperature: float = 0.0
    """Of sampling; 0 is greedy. The end-of-sequence token is always ignored."""
    warmup: int = 2
    """Requests before each case that do not count."""


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Where the figures go beside the terminal."""

    json: Path | None = None
    """Write everything to this file."""
    json_requests: bool = False
    """Put a row for every request into the JSON."""
    plot: Path | None = None
    """Draw latency distributions and throughput over time into this PNG (or SVG, PDF)."""


@dataclass(frozen=True, kw_only=True)
class OfflineFlags(EngineFlags):
    """`diptych bench offline`. The engine's --seed draws the workload too."""

    workload: WorkloadFlags = field(default_factory=WorkloadFlags)
    output: OutputFlags = field(default_factory=OutputFlags)


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """`diptych bench serve`."""

    url: str = f"http://127.0.0.1:{DEFAULT_PORT}"
    """Address of the server, without /v1."""
    model: str | None = None
    """Model to name in the requests; default: the first in /v1/models."""
    api_key: str | None = None
    """Bearer token; default: DIPTYCH_API_KEY."""
    concurrency: int | None = None
    """Requests open at once at most; default: all."""
    request_rate: float | None = None
    """Arrivals a second, as a Poisson process; default: all at once."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    vocab_size: int | None = None
    """Size of the vocabulary that random prompts are drawn from; default: as the server says."""
    seed: int = 0
    """Seed of the workload, of the arrivals and of sampling."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Verbosity of the log on standard error."""
    workload: WorkloadFlags = field(default_factory=WorkloadFlags)
    output: OutputFlags = field(default_factory=OutputFlags)


@dataclass(frozen=True)
class Subcommand:
    """What follows `diptych bench`: a line for the overview, and what runs it (its arguments -> exit status)."""

    summary: str
    run: Callable[[Sequence[str]], int]


def run(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status. Raises: ConfigError for one that is not there."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if arguments else 2
    subcommand = SUBCOMMANDS.get(arguments[0])
    if subcommand is None:
        nearest = difflib.get_close_matches(arguments[0], SUBCOMMANDS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(SUBCOMMANDS)}"
        raise ConfigError(f"unknown benchmark {arguments[0]!r}; {hint}")
    return subcommand.run(arguments[1:])


def _overview() -> str:
    width = max(map(len, SUBCOMMANDS))
    rows = [f"  {name:<{width}}  {subcommand.summary}" for name, subcommand in SUBCOMMANDS.items()]
    return "\n".join(
        ["usage: diptych bench WHAT [OPTIONS]     (diptych bench WHAT --help lists the options)", "", *rows]
    )


def run_offline(arguments: Sequence[str]) -> int:
    """Measure an engine in this process. Returns 1 if no request completed."""
    description = "Measure an engine inside this process, without HTTP. Takes all flags of the engine."
    flags = parse_engine_flags(OfflineFlags, arguments, prog="diptych bench offline", description=description)
    _check_output(flags.output)
    # A log line a request would be a part of what is measured.
    config = replace(flags.engine, server=replace(flags.engine.server, log_requests=False))
    setup_logging("bench", config.server.log_level)
    # Imported only now: the engine takes longer to import than --help may take.
    from diptych.bench import offline
    from diptych.offline import InProcessEngine

    options = offline.OfflineOptions(
        num_warmup=flags.workload.warmup, temperature=flags.workload.temperature, seed=config.model.seed
    )
    engine = InProcessEngine(config)
    try:
        cases = build_cases(flags.workload, lambda: offline.vocabulary_of(engine.service), config.model.seed)
        results = engine.call(offline.measure_cases(engine.service, cases, options))
    finally:
        engine.shutdown()
    rss, info = offline.peak_rss_nbytes(), engine.info
    about = {
        "command": "offline",
        "workload": _plain(flags.workload),
        "config": _without_secrets(engine.config),
        "engine": msgspec.to_builtins(info),
        "peak_rss_nbytes": rss,
    }
    notes = [
        f"{info.architecture} {info.dtype} on {info.device}, attention {info.attention_backend}, "
        f"{info.num_kv_tokens:,} tokens of KV, at most {info.max_num_seqs} in a batch; loaded in {info.load_s:.1f} s",
        f"peak resident memory {rss / GIB:.2f} GiB",
    ]
    return _publish(results, about, notes=notes, output=flags.output)


def run_transfer(arguments: Sequence[str]) -> int:
    """Measure the transfer of KV pages."""
    from diptych.cli import bench_transfer

    return bench_transfer.run(arguments)


def run_pd(arguments: Sequence[str]) -> int:
    """Measure prefill and decode apart against one engine."""
    _import_extra("diptych.bench.serve", "aiohttp")
    from diptych.cli import bench_pd

    return bench_pd.run(arguments)


def run_serve(arguments: Sequence[str]) -> int:
    """Measure a running server. Returns 1 if no request completed."""
    description = "Measure a running OpenAI-compatible server with streaming requests."
    flags = parse_flags(ServeFlags, arguments, prog="diptych bench serve", description=description)
    _check_output(flags.output)
    setup_logging("bench", flags.log_level)
    serve = _import_extra("diptych.bench.serve", "aiohttp")
    options = serve.ServeOptions(
        url=flags.url,
        model=flags.model or "",
        api_key=env.api_key() if flags.api_key is None else flags.api_key,
        concurrency=flags.concurrency,
        request_rate=flags.request_rate,
        num_warmup=flags.workload.warmup,
        temperature=flags.workload.temperature,
        seed=flags.seed,
        timeout_s=flags.timeout,
    )
    results, server = asyncio.run(_measure_server(serve, flags, options))
    about = {
        "command": "serve",
        "workload": _plain(flags.workload),
        "client": _plain(replace(options, api_key=None)),
        "server": _plain(server),
    }
    return _publish(results, about, notes=[f"server {flags.url}"], output=flags.output)


async def _measure_server(serve: ModuleType, flags: ServeFlags, options: Any) -> tuple[list[CaseResult], Any]:
    async with serve.open_session(options) as session:
        server = await serve.describe_server(session)
        if not options.model:
            options = replace(options, model=server.models[0] if server.models else "default")
        cases = build_cases(flags.workload, lambda: serve.vocabulary_of(server, flags.vocab_size), options.seed)
        return await serve.measure_cases(session, cases, options), server


def build_cases(flags: WorkloadFlags, vocabulary: Callable[[], Vocabulary], seed: int) -> list[Case]:
    """The cases that the flags describe.

    Args: vocabulary: called only if prompts are to be drawn. Raises: ConfigError for flags that contradict each other.
    """
    if flags.warmup < 0:
        raise ConfigError(f"--warmup must not be negative, got {flags.warmup}")
    if flags.preset is not None and flags.dataset is not None:
        raise ConfigError("--preset and --dataset exclude each other; give one")
    if flags.preset is not None:
        cases = h200_cases() if flags.preset == "h200" else cpu_cases(vocabulary(), seed)
        return choose_cases(cases, flags.cases)
    if flags.cases is not None:
        raise ConfigError("--cases chooses from a preset; name one with --preset")
    input_len = LengthRange.parse(flags.input_len, flag="--input-len")
    output_len = LengthRange.parse(flags.output_len, flag="--output-len")
    if flags.dataset is not None:
        requests = dataset_requests(flags.dataset, num_prompts=flags.num_prompts, output_len=output_len, seed=seed)
        return [Case(name=flags.dataset.stem, rounds=(requests,))]
    spec = SyntheticSpec(
        num_prompts=DEFAULT_NUM_PROMPTS if flags.num_prompts is None else flags.num_prompts,
        input_len=input_len,
        output_len=output_len,
        shared_prefix_len=flags.shared_prefix_len,
        seed=seed,
    )
    return [Case(name="synthetic", rounds=(synthetic_requests(spec, vocabulary()),))]


def _check_output(flags: OutputFlags) -> None:
    """Find out before the measurement, not after it, that its figures could not be written."""
    for path in (flags.json, flags.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: its folder does not exist")
    if flags.plot is not None:
        _import_extra("diptych.bench.plot", "matplotlib")


def _import_extra(module: str, package: str) -> ModuleType:
    """A module of ours that needs a package of the `bench` extra. Raises: ConfigError if that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(f"this needs {package}: pip install 'diptych[bench]'") from error


def _publish(results: list[CaseResult], about: dict[str, Any], *, notes: Sequence[str], output: OutputFlags) -> int:
    from diptych.bench import report

    report.print_report(results, notes)
    if output.json is not None:
        report.write_json(report.document(results, about, with_requests=output.json_requests), output.json)
    if output.plot is not None:
        title = f"diptych bench {about['command']}: {', '.join(result.case.name for result in results)}"
        _import_extra("diptych.bench.plot", "matplotlib").draw(results, title, output.plot)
    return 0 if any(result.completed for result in results) else 1


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain data."""
    content: dict[str, Any] = msgspec.to_builtins(
        dataclasses.asdict(value), builtin_types=(), enc_hook=str, str_keys=True
    )
    return content


def _without_secrets(config: EngineConfig) -> dict[str, Any]:
    return _plain(replace(config, server=replace(config.server, api_key=None)))


# Every benchmark is registered here, and nowhere else.
SUBCOMMANDS = {
    "offline": Subcommand("an engine inside this process, without HTTP", run_offline),
    "serve": Subcommand("a running server, over HTTP", run_serve),
    "pd": Subcommand("prefill and decode apart against one engine, on this machine", run_pd),
    "transfer": Subcommand("moving KV pages to a peer", run_transfer),
}
