"""All groups of one rank: joins the world once, then opens a `GroupCoordinator` for each axis.

One per process, since torch.distributed keeps one world a process. A world of one joins nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from diptych.errors import RankLost
from diptych.parallel.carriers import Carriers
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.mesh import Axis, Mesh, Placement, axis_groups
from diptych.parallel.shm import SharedMemory, ShmLimits


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """How a world is joined.

    Args: init_method: where the ranks meet, as torch.distributed spells it; None: tcp at the placement's address.
        uses_nccl: False sends device tensors through the CPU, as several ranks on one GPU must.
        uses_shm: False leaves CPU tensors to gloo. timeout_s: how long a live rank is waited for.
    """

    init_method: str | None = None
    uses_nccl: bool = True
    uses_shm: bool = True
    timeout_s: float = 60.0


class World:
    """One rank's groups, by axis. Axes of the same groups share a coordinator.

    Args: device: this rank's.
    Raises: RankLost if the ranks do not meet in time.
    """

    def __init__(self, mesh: Mesh, placement: Placement, *, device: torch.device, options: WorldOptions) -> None:
        self.mesh, self.placement = mesh, placement
        self._device, self._options = device, options
        self._has_joined = mesh.sizes.world > 1
        if self._has_joined:
            self._join()
        self._groups: dict[Axis, GroupCoordinator] = {}
        try:
            self._open_all()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RankLost(f"rank {mesh.rank} could not open its groups, another may have ended: {reason}") from error

    def group(self, axis: Axis) -> GroupCoordinator:
        """This rank's group along `axis`."""
        return self._groups[axis]

    def close(self) -> None:
        """Leave every group and the world. May be called twice."""
        for group in self._groups.values():
            group.close()
        if self._has_joined and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self) -> None:
        method = self._options.init_method or f"tcp://{self.placement.init_addr}"
        try:
            dist.init_process_group(
                "gloo",
                init_method=method,
                rank=self.mesh.rank,
                world_size=self.mesh.sizes.world,
                timeout=timedelta(seconds=self._options.timeout_s),
            )
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.mesh.rank} of {self.mesh.sizes.world} did not meet the others at {method} within "
                f"{self._options.timeout_s:.0f} s: {str(error).strip().splitlines()[0]}"
            ) from error

    def _open_all(self) -> None:
        """In one order on every rank: making a group is collective."""
        shared: dict[tuple[tuple[int, ...], ...], GroupCoordinator] = {}
        for axis in Axis:
            groups = tuple(axis_groups(self.mesh.sizes, axis))
            if groups not in shared:
                shared[groups] = self._open(axis, groups)
            self._groups[axis] = shared[groups]

    def _open(self, axis: Axis, groups: tuple[tuple[int, ...], ...]) -> GroupCoordinator:
        ours = self.mesh.group(axis)
        rank = ours.index(self.mesh.rank)
        if len(ours) == 1:
            return GroupCoordinator(axis.value, ranks=ours, rank=rank)
        cpu_group = self._new_groups(groups, ours, "gloo")
        has_nccl = self._device.type == "cuda" and self._options.uses_nccl
        carriers = Carriers(
            name=axis.value,
            device=self._device,
            cpu_group=cpu_group,
            device_group=self._new_groups(groups, ours, "nccl") if has_nccl else None,
            shm=self._shared_memory(ours, cpu_group),
            timeout_s=self._options.timeout_s,
        )
        return GroupCoordinator(axis.value, ranks=ours, rank=rank, carriers=carriers)

    def _new_groups(
        self, groups: tuple[tuple[int, ...], ...], ours: tuple[int, ...], backend: str
    ) -> dist.ProcessGroup:
        """Make every group of the axis, as each rank must, and return this rank's."""
        limit = timedelta(seconds=self._options.timeout_s)
        made = {ranks: dist.new_group(list(ranks), backend=backend, timeout=limit) for ranks in groups}
        return made[ours]

    def _shared_memory(self, ranks: tuple[int, ...], cpu_group: dist.ProcessGroup) -> SharedMemory | None:
        """With all ranks of the group on this host (LOCAL_SIZE = its size), unless switched off."""
        if not self._options.uses_shm or not self.placement.is_one_node(ranks):
            return None
        return SharedMemory.open(cpu_group, ShmLimits(timeout_s=self._options.timeout_s))
