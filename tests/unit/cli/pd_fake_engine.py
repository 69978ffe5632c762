"""An engine of `diptych pd` without a model: the real server process on the scripted engine of the server's tests."""

from __future__ import annotations

import sys
from pathlib import Path

from diptych.cli.pd_engine import main

FAKE_ENGINE = Path(__file__).parents[1] / "server" / "fake_engine.py"

if __name__ == "__main__":
    sys.exit(main((sys.executable, str(FAKE_ENGINE))))
