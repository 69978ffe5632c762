"""KV transfer between two processes: the same as `diptych bench transfer`, which see."""

from __future__ import annotations

import sys

from diptych.cli.bench_transfer import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
