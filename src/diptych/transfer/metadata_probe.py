"""Tries a peer's metadata in a process that may die of it: UCX aborts on an address that was tampered with.

Whoever can reach the control socket can send metadata, and NIXL hands them to UCX unchecked. So they are loaded first
in a child process with agents of its own; only what it survives reaches the agent that serves. Good ones take some
milliseconds; a refusal costs a new child, about a second, since NIXL keeps half of what it refused. What UCX logs
meanwhile tells how it would reach the peer, which nothing else does before bytes have moved. Knows no rooms, no pages,
no sockets.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
from collections.abc import Callable

from diptych.errors import PeerIncompatible
from diptych.transfer.ucx import LOG_TO_STDERR, flush_log, parse_lanes

_LENGTH = struct.Struct("<I")
_SURVIVED = b"+"
_MAX_LOG_NBYTES = 1 << 20
_START = b"nixlSerDes|Agent"
_CHILD = "from diptych.transfer.nixl import serve_probe; serve_probe()"


class MetadataProbe:
    """One child process, started now and again after each death. Not thread-safe."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._child = _start()

    def check(self, metadata: bytes) -> frozenset[str]:
        """The transports that UCX would use; empty if it does not say. Raises PeerIncompatible unless the child could
        load `metadata`, and lived, in time.
        """
        if not name_in(metadata):
            raise PeerIncompatible(f"{len(metadata)} bytes are no metadata of a NIXL agent")
        if self._child.poll() is not None:
            self._restart()
        answer = self._ask(metadata)
        if answer != _SURVIVED:
            self._restart()
            raise PeerIncompatible(f"the metadata of agent {name_in(metadata)!r} are damaged, or it cannot be reached")
        return parse_lanes(self._log())

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
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

    def _log(self) -> str:
        """What the child has logged since it was asked last."""
        assert self._child.stderr is not None
        return (self._child.stderr.read(_MAX_LOG_NBYTES) or b"").decode(errors="replace")

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


def serve(prepare: Callable[[], Callable[[bytes], object]]) -> None:
    """The child: load what comes and say that it worked, until the pipe closes or it did not.

    prepare: makes what loads one peer's metadata, ahead of time; that raises PeerIncompatible.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    load = prepare()
    while len(header := requests.read(_LENGTH.size)) == _LENGTH.size:
        metadata = requests.read(*_LENGTH.unpack(header))
        try:
            load(metadata)
        except PeerIncompatible:
            return
        flush_log()
        answers.write(_SURVIVED)
        answers.flush()
        load = prepare()


def _start() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        ["env", *LOG_TO_STDERR, sys.executable, "-c", _CHILD],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stderr is not None
    os.set_blocking(child.stderr.fileno(), False)
    return child
