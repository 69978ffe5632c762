"""The Triton kernels' own tests, with small shapes, in Triton's interpreter: it takes the GPU's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
TESTS = ["norm", "heads", "activation", "embedding", "sampling", "transformer"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernels_pass_their_tests() -> None:
    """In a process of its own: the variable decides what `triton.jit` makes of every kernel that is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(ROOT / "tests" / "gpu" / f"test_{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
