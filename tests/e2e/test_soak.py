"""scripts/soak on the tiny model: 200 streams, of which many hang up or are aborted, leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "scripts" / "soak"
FLAGS = ["--kv-cache-memory", "2MiB", "--num-threads", "1", "--dtype", "float32", "--max-num-seqs", "32"]


def soak(tiny_model: Path, seconds: int) -> dict:
    """The report. The pool is too small for all that may run at once, so that sequences are retracted too."""
    command = [sys.executable, str(SOAK), "--seconds", str(seconds), "--", str(tiny_model), *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def check(report: dict) -> None:
    assert report["wrong"] == []
    # A busy machine does a tenth of what a quiet one does.
    assert report["outcomes"]["finished"] > 30
    assert report["outcomes"]["disconnected"] > 15
    assert report["outcomes"]["aborted"] > 2


@pytest.mark.timeout(300)
def test_short(tiny_model):
    check(soak(tiny_model, 16))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_minutes(tiny_model):
    check(soak(tiny_model, 180))
