"""Compiles the kernel library with the machine's C++ compiler, once for each version of its sources.

The library has a plain C interface and includes no header of torch or Python: seconds to compile, and one build serves
every version of both. It is kept in the cache folder under a hash of all that went into it. Knows nothing of what the
kernels do.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from diptych.env import cache_dir

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-pthread",
)
SPEED_FLAGS = ("-O2",)
SANITIZER_FLAGS = (
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")


class BuildError(Exception):
    """The library could not be compiled; the message says why, in one line."""


@dataclass(frozen=True, kw_only=True)
class InstructionSet:
    """One set of kernels: `flags` let the compiler use it."""

    name: str
    flags: tuple[str, ...] = ()
    has_tiles: bool = False


PORTABLE = InstructionSet(name="portable")
X86_SETS = (
    InstructionSet(name="avx2", flags=_AVX2),
    InstructionSet(name="avx512", flags=_AVX512),
    InstructionSet(
        name="amx",
        flags=(*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"),
        has_tiles=True,
    ),
)


def kernel_library(*, sanitize: bool = False) -> Path:
    """The compiled library's file, compiled now if it is not in the cache.

    Args: sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer; the process must have libasan preloaded.
    Raises: BuildError if there is no compiler or it fails.
    """
    compiler = _find_compiler()
    flags = (*FLAGS, *(SANITIZER_FLAGS if sanitize else SPEED_FLAGS))
    target = cache_dir() / "kernels" / _fingerprint(compiler, flags) / "libdiptych.so"
    if not target.is_file():
        started = time.perf_counter()
        logger.info("compiling the CPU kernels with %s (once)", compiler)
        _build(target, compiler, flags)
        logger.info("the CPU kernels took %.0f s to compile", time.perf_counter() - started)
    return target


def _find_compiler() -> str:
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"no C++ compiler was found (looked for {', '.join(COMPILERS)})")


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    """Hash of sources, flags, compiler and machine."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((compiler, version, flags, X86_SETS, platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(target: Path, compiler: str, flags: tuple[str, ...]) -> None:
    """Compile beside the target and rename, so that nobody sees half a file; who comes second waits for the first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        work = Path(folder)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            sets = pool.map(lambda which: _compile_set(which, compiler, flags, work), (*X86_SETS[::-1], PORTABLE))
            plain = pool.map(
                lambda name: _compile(SOURCES / name, compiler, flags, work),
                ("library.cpp", "thread_pool.cpp", "gguf_pack.cpp", "collectives.cpp", "collectives_wait.cpp"),
            )
            objects = [*sets, *plain]
        library = work / target.name
        _run([compiler, *flags, "-shared", "-o", str(library), *map(str, objects)])
        library.replace(target)


def _compile_set(which: InstructionSet, compiler: str, flags: tuple[str, ...], work: Path) -> Path:
    """One instruction set's object file; empty kernels where the machine or the compiler does not have the set."""
    define = f"-DDIPTYCH_ISA={which.name}"
    if which is PORTABLE or platform.machine() in ("x86_64", "AMD64"):
        own = (*flags, *which.flags, define, f"-DDIPTYCH_AMX={int(which.has_tiles)}")
        try:
            return _compile(SOURCES / "kernels.cpp", compiler, own, work, name=which.name)
        except BuildError as error:
            if which is PORTABLE:
                raise
            logger.warning("kernels for %s are left out: %s", which.name, error)
    return _compile(SOURCES / "absent.cpp", compiler, (*flags, define), work, name=which.name)


def _compile(source: Path, compiler: str, flags: tuple[str, ...], work: Path, *, name: str | None = None) -> Path:
    target = work / f"{name or source.stem}.o"
    _run([compiler, *flags, "-c", str(source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0]}")
