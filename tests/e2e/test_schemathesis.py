"""Schemathesis against /openapi.json: whatever the schema allows, or nearly allows, is never answered with a 500."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_no_server_error(tiny_server, tmp_path: Path):
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{tiny_server.url}/openapi.json"),
        *("--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--max-examples", "8"),
        # These make an engine refuse, hold or wait, which is what they are for.
        *(
            "--exclude-path-regex",
            "^/(sleep|release_memory|pause|init_weights)",
        ),
        *("--seed", "1", "--request-timeout", "30", "--suppress-health-check", "all", "--generation-database", "none"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 500
    tiny_server.wait_until_idle()
