"""What carries a group's collectives: NCCL for tensors on a device, shared memory or gloo for those on the CPU.

A device tensor in a group without NCCL (several ranks on one GPU) goes through the CPU. What torch.distributed raises
becomes RankLost here and nowhere else. Knows nothing of models and axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from diptych.errors import RankLost
from diptych.parallel.shm import SharedMemory

T = TypeVar("T")

# Newer versions of torch have new names for these, and warn of the old ones.
_all_gather_single = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, kw_only=True)
class Carriers:
    """A group's ways. device_group: NCCL; None on a CPU, or where NCCL cannot be used.

    cpu_group: gloo. shm: None where ranks run on several hosts or there are no kernels. timeout_s: of a barrier.
    """

    name: str
    device: torch.device
    cpu_group: dist.ProcessGroup
    device_group: dist.ProcessGroup | None = None
    shm: SharedMemory | None = None
    timeout_s: float = 60.0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.cpu_group.size()

    @property
    def object_device(self) -> torch.device:
        """Where the bytes of an object must lie to travel through the device group."""
        return torch.device("cpu") if self.device_group is None else self.device

    def group_of(self, x: torch.Tensor) -> dist.ProcessGroup | None:
        """The process group that carries this tensor as it lies; None if it must go through the CPU."""
        return self.cpu_group if x.device.type == "cpu" else self.device_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `ops.Collectives`."""
        if self.shm is not None and SharedMemory.can_reduce(x):
            return self.shm.all_reduce(x)
        group = self.group_of(x)
        if group is None:
            return self.all_reduce(x.cpu()).to(x.device)
        x = x.contiguous()
        self.call("all_reduce", lambda: dist.all_reduce(x, group=group))
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See `ops.Collectives`."""
        group = self.group_of(x)
        if group is None:
            return self.all_gather(x.cpu(), dim).to(x.device)
        if self.shm is not None and x.device.type == "cpu":
            return self.shm.all_gather(x, dim)
        x = x.contiguous()
        joined = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self.call("all_gather", lambda: _all_gather_single(joined, x, group=group))
        if dim == 0:
            return joined
        parts = joined.view(self.size, *x.shape).movedim(0, dim)
        return parts.reshape(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See `ops.Collectives`."""
        share = x.shape[dim] // self.size
        group = self.group_of(x)
        if group is None:
            return self.reduce_scatter(x.cpu(), dim).to(x.device)
        if self.shm is not None and SharedMemory.can_reduce(x):
            return self.shm.all_reduce(x).narrow(dim, self.shm.rank * share, share).contiguous()
        first = x.movedim(dim, 0).contiguous()
        out = first.new_empty((share, *first.shape[1:]))
        self.call("reduce_scatter", lambda: _reduce_scatter_single(out, first, group=group))
        return out.movedim(0, dim).contiguous()

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """`x` of the group's rank `src`, in place."""
        group = self.group_of(x)
        if group is None:
            return x.copy_(self.broadcast(x.cpu(), src))
        self.call("broadcast", lambda: dist.broadcast(x, group=group, group_src=src))
        return x

    def start_sending(self, x: torch.Tensor, dst: int) -> tuple[dist.Work | None, torch.Tensor]:
        """Begin to send; the tensor returned must live and stay as it is until the work is done."""
        group = self.group_of(x)
        if group is None:
            return self.start_sending(x.cpu(), dst)
        x = x.contiguous()
        return self.call(f"send to rank {dst}", lambda: dist.isend(x, group=group, group_dst=dst)), x

    def receive(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Fill `x`, which is contiguous, with what rank `src` of the group sends."""
        group = self.group_of(x)
        if group is None:
            return x.copy_(self.receive(torch.empty_like(x, device="cpu"), src))
        self.call(f"receive from rank {src}", lambda: dist.recv(x, group=group, group_src=src))
        return x

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.shm is not None:
            return self.shm.barrier()
        limit = timedelta(seconds=self.timeout_s)
        self.call("barrier", lambda: dist.monitored_barrier(self.cpu_group, timeout=limit, wait_all_ranks=True))

    def close(self) -> None:
        """Unmap and disconnect. Others that still wait for this rank get RankLost."""
        if self.shm is not None:
            self.shm.close()
        for group in (self.device_group, self.cpu_group):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Call torch.distributed. Raises: RankLost for whatever it raises."""
        try:
            return function()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RankLost(f"{what} in the {self.name} group failed, the engine must be restarted: {reason}") from error
