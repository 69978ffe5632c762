"""Collectives of CPU ranks of one host over shared memory: csrc/collectives.cpp, and how its segment is made.

The segment is an anonymous file (memfd): it has no name, so that nothing is left of it once the last rank is gone,
whatever killed it. The first rank tells the others its process id and descriptor; they open it through /proc, map it,
and all close it. Where a rank cannot (another container, another user), all of them use gloo. Used by one thread.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from diptych.errors import RankLost
from diptych.kernels import memory
from diptych.kernels.library import DTYPES, Kernels, kernels

logger = logging.getLogger(__name__)

PIECE_NBYTES = 256 * 1024
SPIN_US = 50.0
MAX_RANKS = 64

_FAILURES = {
    1: "is dead",
    2: "is stopped (SIGSTOP?)",
    3: "did not come within {timeout_s:.0f} s",
    4: "has left the group",
    5: "is in another collective, or in one of another size or dtype",
}
"""By the library's codes."""


@dataclass(frozen=True, kw_only=True)
class ShmLimits:
    """timeout_s: how long a live rank is waited for. spin_us: time before sleeping; None: by the number of cores."""

    timeout_s: float = 60.0
    spin_us: float | None = None
    piece_nbytes: int = PIECE_NBYTES


class SharedMemory:
    """One rank's part in its group's segment. `open` makes one; after a RankLost it is of no more use."""

    def __init__(self, library: Kernels, handle: int, *, rank: int, size: int, limits: ShmLimits) -> None:
        self._library, self._handle, self._limits = library, handle, limits
        self.rank, self.size = rank, size

    @staticmethod
    def open(group: dist.ProcessGroup, limits: ShmLimits | None = None) -> SharedMemory | None:
        """The ranks' common segment, made now; None on every rank if one of them cannot have it. Collective.

        Args: group: the ranks, over gloo.
        """
        limits = limits or ShmLimits()
        library = kernels()
        is_possible = library is not None and group.size() <= MAX_RANKS and Path("/proc/self/fd").exists()
        if not _all_agree(is_possible, group) or library is None:
            return None
        handle = _open_segment(library, group, limits)
        found = None
        if handle is not None:
            found = SharedMemory(library, handle, rank=group.rank(), size=group.size(), limits=limits)
        have_all = _all_agree(found is not None, group)
        if have_all and _all_agree(library.shm_sees_all(handle) != 0, group):
            return found
        if found is not None:
            found.close()
        logger.warning(
            "ranks cannot map each other's memory (another container or user?): collectives use gloo, slower"
        )
        return None

    @staticmethod
    def can_reduce(x: torch.Tensor) -> bool:
        """Whether `all_reduce` has a kernel for it."""
        return x.device.type == "cpu" and x.dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks in float32, rounded once, the same bits on every rank; in `x` if that is contiguous.

        Args: x: float32, bfloat16 or float16 on the CPU, of the same shape everywhere.
        Raises: RankLost.
        """
        x = x.contiguous()
        address = x.data_ptr()
        self._check(
            "all_reduce", self._library.shm_allreduce(self._handle, address, address, x.numel(), DTYPES[x.dtype])
        )
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors joined along `dim`, in rank order.

        Args: x: of any dtype, on the CPU, of the same shape everywhere. dim: not negative.
        Raises: RankLost.
        """
        x = x.contiguous()
        shape = x.shape
        out = memory.empty((*shape[:dim], self.size * shape[dim], *shape[dim + 1 :]), x.dtype)
        num_rows = shape[:dim].numel()
        row_nbytes = shape[dim:].numel() * x.itemsize
        self._check(
            "all_gather",
            self._library.shm_allgather(self._handle, out.data_ptr(), x.data_ptr(), num_rows, row_nbytes),
        )
        return out

    def barrier(self) -> None:
        """Wait until every rank is here. Raises: RankLost."""
        self._check("barrier", self._library.shm_barrier(self._handle))

    def close(self) -> None:
        """Unmap the segment; ranks that still wait for this one get RankLost. May be called twice."""
        if self._handle:
            self._library.shm_close(self._handle)
            self._handle = 0

    def _check(self, what: str, status: int) -> None:
        if status == 0:
            return
        code, rank = status & 0xFF, status >> 8
        reason = _FAILURES[code].format(timeout_s=self._limits.timeout_s)
        raise RankLost(f"{what} of {self.size} ranks: rank {rank} {reason}; the engine must be restarted", rank=rank)


def _all_agree(is_possible: bool, group: dist.ProcessGroup) -> bool:
    """Whether every rank says yes."""
    votes = torch.tensor([int(is_possible)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())


def _open_segment(library: Kernels, group: dist.ProcessGroup, limits: ShmLimits) -> int | None:
    """This rank's handle, or None. The first rank keeps the file open until the others have mapped it."""
    rank, size = group.rank(), group.size()
    token = secrets.randbits(62) | 1
    file = _create(library.shm_nbytes(size, limits.piece_nbytes)) if rank == 0 else -1
    try:
        handle = _map(library, file, rank, size, token, limits) if file >= 0 else None
        ticket = torch.tensor([os.getpid(), file, token])
        dist.broadcast(ticket, group=group, group_src=0)
        if rank > 0:
            pid, theirs, token = ticket.tolist()
            file = _open_of(pid, theirs)
            handle = _map(library, file, rank, size, token, limits) if file >= 0 else None
        dist.barrier(group=group)
        return handle
    finally:
        if file >= 0:
            os.close(file)


def _create(nbytes: int) -> int:
    """A new anonymous file whose memory is there already; -1 if there is not so much."""
    file = os.memfd_create("diptych-collectives", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(
            file, 0, nbytes
        )  # without it, memory that is missing would be a SIGBUS in the middle of a step
    except OSError as error:
        logger.warning("no %d bytes of shared memory for the ranks: %s", nbytes, error)
        os.close(file)
        return -1
    return file


def _open_of(pid: int, file: int) -> int:
    """Another process's open file, opened here; -1 if this process may not."""
    try:
        return os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("cannot open the ranks' shared memory: %s", error)
        return -1


def _map(library: Kernels, file: int, rank: int, size: int, token: int, limits: ShmLimits) -> int | None:
    spin_us = limits.spin_us
    if spin_us is None:
        spin_us = SPIN_US if size <= len(os.sched_getaffinity(0)) else 0.0
    spin_ns, timeout_ns = int(spin_us * 1e3), int(limits.timeout_s * 1e9)
    handle: int | None = library.shm_open(
        file, rank, size, limits.piece_nbytes, token, int(rank == 0), spin_ns, timeout_ns
    )
    return handle
