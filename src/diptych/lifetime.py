"""How a child process ends with the process that started it, whatever ends that one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """What a child calls, before exec or first of all, so that Linux kills it when the thread that started it ends.
    None elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before we were armed
            os._exit(1)

    return arm
