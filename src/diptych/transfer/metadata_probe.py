"""Tries a peer's metadata in a process that may die of it: UCX aborts on an address that was tampered with.

Whoever can reach the control socket can send metadata, and NIXL hands them to UCX unchecked. So they are loaded first
in a child process with an agent of its own; only what it survives reaches the agent that serves. Good ones take some
milliseconds; a refusal costs a new child, about a second, since NIXL keeps half of what it refused. Knows no rooms, no
pages, no sockets.
"""

from __future__ import annotations

import select
import struct
import subprocess
import sys
from collections.abc import Callable

from diptych.errors import PeerIncompatible

_LENGTH = struct.Struct("<I")
_SURVIVED = b"+"
_START = b"nixlSerDes|Agent"
_CHILD = "from diptych.transfer.nixl import serve_probe; serve_probe()"


class MetadataProbe:
    """One child process, started now and again after each death. Not thread-safe."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._child = _start()

    def check(self, metadata: bytes) -> None:
        """Raise PeerIncompatible unless the child could load `metadata`, and lived, in time."""
        if not name_in(metadata):
            raise PeerIncompatible(f"{len(metadata)} bytes are no metadata of a NIXL agent")
        if self._child.poll() is not None:
            self._restart()
        answer = self._ask(metadata)
        if answer != _SURVIVED:
            self._restart()
            raise PeerIncompatible(f"the metadata of agent {name_in(metadata)!r} are damaged, or it cannot be reached")

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, metadata: bytes) -> bytes:
        """The child's answer; empty if it died or took too long."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(_LENGTH.pack(len(metadata)) + metadata)
            self._child.stdin.flush()
        except OSError:
            return b""
        readable = select.select([self._child.stdout], [], [], self._timeout_s)[0]
        return self._child.stdout.read(1) if readable else b""

    def _restart(self) -> None:
        self.close()
        self._child = _start()


def name_in(metadata: bytes) -> str:
    """The agent's name as NIXL writes it at the beginning of its metadata; empty if it is not found there."""
    if not metadata.startswith(_START):
        return ""
    rest = metadata[len(_START) :]
    nbytes = int.from_bytes(rest[:8], "little")
    return rest[8 : 8 + nbytes].decode(errors="replace")


def serve(load: Callable[[bytes], object]) -> None:
    """The child: load what comes and say that it worked, until the pipe closes or it did not.

    load: raises PeerIncompatible.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(header := requests.read(_LENGTH.size)) == _LENGTH.size:
        metadata = requests.read(*_LENGTH.unpack(header))
        try:
            load(metadata)
        except PeerIncompatible:
            return
        answers.write(_SURVIVED)
        answers.flush()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
