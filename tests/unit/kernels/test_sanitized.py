"""The other tests of this folder once more, over a library with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAMILIES = ("attention", "collectives", "decoder_layer", "gguf_linear", "linear", "norm", "quantized", "reduce")


def preloaded_sanitizer() -> str | None:
    """libasan of the compiler that the kernels are built with, and libstdc++, whose throw it must find when it starts;
    None if they cannot be found."""
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        try:
            asked = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        paths.append(Path(asked.stdout.strip()))
    return " ".join(map(str, paths)) if all(path.is_absolute() and path.exists() for path in paths) else None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("DIPTYCH_KERNELS_SANITIZE" in os.environ, reason="this is the inner run")
def test_no_sanitizer_complains() -> None:
    sanitizer = preloaded_sanitizer()
    if sanitizer is None:
        pytest.skip("g++ has no libasan here")
    environment = {
        **os.environ,
        "DIPTYCH_KERNELS_SANITIZE": "1",
        "LD_PRELOAD": sanitizer,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep what they need until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    files = [str(HERE / f"test_{name}.py") for name in FAMILIES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "passed" in done.stdout
