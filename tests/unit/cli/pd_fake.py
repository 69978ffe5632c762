"""`diptych pd` on scripted engines, as a process: `python pd_fake.py [flags]`."""

from __future__ import annotations

import sys
from pathlib import Path

from diptych.cli import pd_cluster
from diptych.cli.main import main

if __name__ == "__main__":
    pd_cluster.ENGINE_PROGRAM = (sys.executable, str(Path(__file__).with_name("pd_fake_engine.py")))
    sys.exit(main(["pd", *sys.argv[1:]]))
