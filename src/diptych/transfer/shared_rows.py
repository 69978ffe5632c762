"""Handoff rows that an engine and the process of its first rank both see: one anonymous file, mapped twice.

It has no name, so nothing is left behind whoever dies. Never imports torch.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from diptych.errors import ConfigError


class SharedRows:
    """Memory of the engine that another process of the same user may map. rows: uint8 [nbytes], zero at first."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("diptych-handoff")
        os.ftruncate(self._file, nbytes)
        self.rows = _mapped(self._file, nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Nobody new can map it; whoever has keeps it."""
        os.close(self._file)


def open_rows(path: str, nbytes: int) -> NDArray[np.uint8]:
    """Map what `SharedRows.path` names in another process. Raises ConfigError if that cannot be."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ConfigError(f"the engine's handoff rows cannot be mapped at {path}: {error}") from error
    try:
        if os.fstat(file).st_size != nbytes:
            raise ConfigError(f"the engine's handoff rows at {path} are {os.fstat(file).st_size} bytes, not {nbytes}")
        return _mapped(file, nbytes)
    finally:
        os.close(file)


def _mapped(file: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8)
