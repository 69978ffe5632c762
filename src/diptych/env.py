"""The few environment variables that Diptych reads, typed. No other module reads os.environ; nothing writes it.

DIPTYCH_CACHE_DIR   where assembled models and compiled kernels go; default: diptych in $XDG_CACHE_HOME or ~/.cache
DIPTYCH_API_KEY     default of --api-key, so that the key need not stand on a command line
DIPTYCH_CLUSTER_KEY default of --cluster-key, likewise
DIPTYCH_KERNELS     CPU kernels: "off", or the instruction set to use (amx, avx512, avx2, portable); default: the best
DIPTYCH_KERNELS_SANITIZE
                    1: kernels with AddressSanitizer and UBSan (slow; needs libasan preloaded); for tests
LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX
                    set by Kubernetes' LeaderWorkerSet: where node 0 is, how many nodes there are, which one this is
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from diptych.errors import ConfigError


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


@dataclass(frozen=True)
class LeaderWorkerSet:
    """What Kubernetes' LeaderWorkerSet tells a pod about the nodes of its group."""

    leader_address: str
    group_size: int
    worker_index: int


def leader_worker_set() -> LeaderWorkerSet | None:
    """The group that this pod belongs to; None outside of one.

    Raises: ConfigError if only some of the three variables are set, or a number is none.
    """
    names = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    values = [os.environ.get(name, "") for name in names]
    if not any(values):
        return None
    if not all(values):
        missing = ", ".join(name for name, value in zip(names, values, strict=True) if not value)
        raise ConfigError(
            f"{missing} is not set though others of LeaderWorkerSet's variables are; set all three or none"
        )
    address, size, index = values
    if not (size.isdecimal() and index.isdecimal()):
        raise ConfigError(f"LWS_GROUP_SIZE is {size!r} and LWS_WORKER_INDEX is {index!r}; both must be numbers")
    return LeaderWorkerSet(address, int(size), int(index))


def api_key() -> str | None:
    """Bearer token for the HTTP server; None if the variable is unset or empty."""
    return os.environ.get("DIPTYCH_API_KEY") or None


def cluster_key() -> str | None:
    """Secret that all engines share; None if the variable is unset or empty."""
    return os.environ.get("DIPTYCH_CLUSTER_KEY") or None


def of_child(**additions: str) -> dict[str, str]:
    """The environment of a process to be started: this one's, and some variables besides."""
    return {**os.environ, **additions}
