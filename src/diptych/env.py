"""The few environment variables that Diptych reads, typed. No other module reads os.environ; nothing writes it.

DIPTYCH_CACHE_DIR   where assembled models and compiled kernels go; default: diptych in $XDG_CACHE_HOME or ~/.cache
DIPTYCH_API_KEY     default of --api-key, so that the key need not stand on a command line
DIPTYCH_CLUSTER_KEY default of --cluster-key, likewise
DIPTYCH_KERNELS     CPU kernels: "off", or the instruction set to use (amx, avx512, avx2, portable); default: the best
DIPTYCH_KERNELS_SANITIZE
                    1: kernels with AddressSanitizer and UBSan (slow; needs libasan preloaded); for tests
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for files that can be made again at any time; it may not exist yet."""
    explicit = os.environ.get("DIPTYCH_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg else Path.home() / ".cache"
    return base / "diptych"


def kernels() -> str | None:
    """The instruction set that CPU kernels are to use, or "off"; None leaves the choice to them."""
    return os.environ.get("DIPTYCH_KERNELS") or None


def sanitize_kernels() -> bool:
    """Whether to compile and load the CPU kernels with sanitizers."""
    return os.environ.get("DIPTYCH_KERNELS_SANITIZE") == "1"


def api_key() -> str | None:
    """Bearer token for the HTTP server; None if the variable is unset or empty."""
    return os.environ.get("DIPTYCH_API_KEY") or None


def cluster_key() -> str | None:
    """Secret that all engines share; None if the variable is unset or empty."""
    return os.environ.get("DIPTYCH_CLUSTER_KEY") or None
