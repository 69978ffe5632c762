"""A second process for the contract suite: one NIXL agent with one region, polling all the time, asked over a pipe.

Run as a script, so that it starts quickly and imports neither pytest nor torch. One line of JSON a request or answer.
"""

from __future__ import annotations

import select
import sys
import time

import msgspec
import numpy as np

from diptych.transfer.backend import MemoryRegion
from diptych.transfer.nixl import NixlBackend

POLL_S = 0.0005


def main() -> None:
    """Serve until the pipe closes."""
    name, nbytes = sys.argv[1], int(sys.argv[2])
    memory = np.zeros(nbytes, dtype=np.uint8)
    backend = NixlBackend(name)
    backend.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    answer((backend.metadata(), memory.ctypes.data))
    arrived: list[tuple[str, bytes]] = []
    while True:
        arrived += backend.notifications()
        backend.poll()
        if not select.select([sys.stdin.buffer], [], [], POLL_S)[0]:
            continue
        line = sys.stdin.buffer.readline()
        if not line:
            return
        what, *arguments = msgspec.json.decode(line)
        if what == "notifications":
            wait_for(backend, arrived, *arguments)
            answer(arrived)
            arrived = []
        else:
            start, count = arguments
            answer(memory[start : start + count].tobytes())


def wait_for(backend: NixlBackend, arrived: list[tuple[str, bytes]], count: int, seconds: float) -> None:
    """Poll until so many notifications have come, or for so long."""
    deadline = time.monotonic() + seconds
    while len(arrived) < count and time.monotonic() < deadline:
        arrived += backend.notifications()
        time.sleep(POLL_S)


def answer(value: object) -> None:
    """One line to the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
