"""What NIXL does not tell about UCX, which carries its bytes: which transport a write really took.

UCX picks a transport for each endpoint by itself, and falls back to TCP without a word. Two ways to find out, neither
of which trusts a setting: how many bytes this process sent over TCP while a write ran, and what UCX logs of its lanes
when a process that may log meets the peer. Linux only. Knows no pages and no requests.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from diptych.transfer.backend import MemoryKind

# Offsets of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (linux/tcp.h, since 4.1), unsigned 64-bit.
_BYTES_ACKED = slice(120, 128)
_BYTES_RECEIVED = slice(128, 136)
_FDS = "/proc/self/fd"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_LANES = re.compile(r"UCX\s+INFO\s+.*\bcfg#\d+\s+(?P<lanes>.*)")
# How `env` has UCX log the endpoints that it configures.
LOG_TO_STDERR = ("UCX_LOG_LEVEL=info", "UCX_LOG_FILE=/dev/stderr")
_SHARED_MEMORY = frozenset({"cma", "knem", "xpmem", "sysv", "posix"})
_RDMA = re.compile(r"rc_|dc_|ud_|srd|gga_")
_PROBE = "import sys; from diptych.transfer.nixl import meet; meet(sys.stdin.buffer.read())"


def tcp_bytes_sent() -> int:
    """Bytes that the TCP connections open in this process have sent and had acknowledged."""
    return sum(_counted(connection, _BYTES_ACKED) for connection in _tcp_sockets())


def tcp_bytes_received() -> int:
    """Bytes that the TCP connections open in this process have received."""
    return sum(_counted(connection, _BYTES_RECEIVED) for connection in _tcp_sockets())


def carrier(kind: MemoryKind, nbytes: int, tcp_nbytes: int) -> str:
    """What carried a write: "tcp" if at least half of its bytes show up there, else what is left on this host.

    kind: of the memory written to. nbytes: of the write. tcp_nbytes: what `tcp_bytes_sent` grew by meanwhile.
    """
    if 2 * tcp_nbytes >= nbytes:
        return "tcp"
    local = "cuda_ipc" if kind is MemoryKind.VRAM else "shm"
    has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
    return f"{local} or rdma" if has_rdma else local


def carrier_of(kind: MemoryKind, lanes: frozenset[str]) -> str:
    """What will carry memory of a kind over these transports: "cuda_ipc", "shm", "rdma" or "tcp"; or "unknown"."""
    if kind is MemoryKind.VRAM and "cuda_ipc" in lanes:
        return "cuda_ipc"
    if kind is MemoryKind.DRAM and lanes & _SHARED_MEMORY:
        return "shm"
    if any(_RDMA.match(lane) for lane in lanes):
        return "rdma"
    return "tcp" if "tcp" in lanes else "unknown"


def flush_log() -> None:
    """Hand over what UCX has logged in this process: it writes to a buffered file."""
    ctypes.CDLL(None).fflush(None)


def lanes_to(metadata: bytes, *, timeout_s: float = 30.0) -> frozenset[str]:
    """Transports that UCX would use between this host and the agent of `metadata`, e.g. {"cma", "tcp"}.

    Asks a process of its own, which may log and whose UCX is not the engine's: about a second. Empty if that fails.
    """
    command = ["env", *LOG_TO_STDERR, sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, input=metadata, capture_output=True, timeout=timeout_s, check=True)
    except (subprocess.SubprocessError, OSError):
        return frozenset()
    return parse_lanes(done.stderr.decode(errors="replace"))


def parse_lanes(log: str) -> frozenset[str]:
    """Transports named in UCX's log of the endpoints it configured, those to itself left out.

    A line ends like `agent intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)`.
    """
    found: set[str] = set()
    for line in log.splitlines():
        match = _LANES.search(line)
        if match is not None and " self cfg#" not in line:
            found.update(re.findall(r"(\w+)/\w+", match["lanes"]))
    return frozenset(found)


def _tcp_sockets() -> Iterator[socket.socket]:
    """The process's TCP sockets, each through a descriptor of its own that is closed after use."""
    for entry in os.listdir(_FDS):
        try:
            if not os.readlink(f"{_FDS}/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                    yield duplicate
        except OSError:
            continue  # closed meanwhile by whoever owns it


def _counted(connection: socket.socket, counter: slice) -> int:
    try:
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
    except OSError:
        return 0
    return int.from_bytes(information[counter], sys.byteorder)
