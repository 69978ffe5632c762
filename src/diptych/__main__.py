"""`python -m diptych`: the same as the `diptych` command."""

from __future__ import annotations

import sys

from diptych.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
