"""Ranks as threads of one process: groups whose collectives pass tensors by reference. Quick, and exact in rank order.

What carries tensors between processes has tests of its own; here it is what layers and workers do with a group.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from diptych.parallel.carriers import Carriers
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import LayerGroups
from diptych.parallel.mesh import Axis, Mesh, MeshSizes, Placement, axis_groups
from diptych.parallel.world import World

T = TypeVar("T")
WAIT_S = 30.0
_names = itertools.count()


class Meeting:
    """Where the ranks of one group meet."""

    def __init__(self, size: int) -> None:
        self.size, self.name = size, f"threads-{next(_names)}"
        self.barrier = threading.Barrier(size)
        self.shown: list[torch.Tensor | None] = [None] * size
        self.sent: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            pair: queue.SimpleQueue() for pair in itertools.product(range(size), repeat=2)
        }
        self.num_calls: dict[str, int] = {}


@dataclass
class ThreadCarriers:
    """One rank's way to the others; passes for `Carriers`."""

    meeting: Meeting
    rank: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def size(self) -> int:
        return self.meeting.size

    @property
    def object_device(self) -> torch.device:
        return self.device

    def _exchange(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.meeting.shown[self.rank] = x.clone()
        self.meeting.barrier.wait(WAIT_S)
        found = [cast(torch.Tensor, shown) for shown in self.meeting.shown]
        if self.rank == 0:
            self.meeting.num_calls[what] = self.meeting.num_calls.get(what, 0) + 1
        self.meeting.barrier.wait(WAIT_S)
        assert {shown.shape for shown in found} == {x.shape}, "the ranks' tensors differ in shape"
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.stack([shown.float() for shown in self._exchange("all_reduce", x)]).sum(0).to(x.dtype)
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange("all_gather", x), dim)

    def start_sending(self, x: torch.Tensor, dst: int) -> tuple[None, torch.Tensor]:
        self.meeting.sent[self.rank, dst].put(x.clone())
        return None, x

    def receive(self, x: torch.Tensor, src: int) -> torch.Tensor:
        return x.copy_(self.meeting.sent[src, self.rank].get(timeout=WAIT_S).view(x.shape))

    def barrier(self) -> None:
        self.meeting.barrier.wait(WAIT_S)

    def close(self) -> None:
        """Others may still be on their way out of the last call."""


class ThreadWorld:
    """One thread's groups; passes for a `World`."""

    def __init__(self, sizes: MeshSizes, rank: int, meetings: dict[tuple[int, ...], Meeting]) -> None:
        self.mesh, self.placement = Mesh(sizes=sizes, rank=rank), Placement(world=sizes.world)
        self._groups: dict[Axis, GroupCoordinator] = {}
        opened: dict[tuple[int, ...], GroupCoordinator] = {}
        for axis in Axis:
            ranks = self.mesh.group(axis)
            if ranks not in opened:
                opened[ranks] = _seat(ranks, ranks.index(rank), meetings[ranks])
            self._groups[axis] = opened[ranks]

    def group(self, axis: Axis) -> GroupCoordinator:
        return self._groups[axis]

    @property
    def groups(self) -> LayerGroups:
        return LayerGroups.of(cast(World, self))

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def _seat(ranks: tuple[int, ...], rank: int, meeting: Meeting) -> GroupCoordinator:
    name = f"{meeting.name}-{rank}"
    if len(ranks) == 1:
        return GroupCoordinator(name, ranks=ranks, rank=0)
    return GroupCoordinator(name, ranks=ranks, rank=rank, carriers=cast(Carriers, ThreadCarriers(meeting, rank)))


def run_ranks(sizes: MeshSizes, work: Callable[[ThreadWorld], T]) -> list[T]:
    """What `work` returns on every rank. Raises: what the first of them that failed by itself raised."""
    meetings = {ranks: Meeting(len(ranks)) for axis in Axis for ranks in axis_groups(sizes, axis)}
    results: list[Any] = [None] * sizes.world
    errors: list[Exception] = []

    def run(rank: int) -> None:
        world = ThreadWorld(sizes, rank, meetings)
        try:
            results[rank] = work(world)
        except Exception as error:
            errors.append(error)
            for meeting in meetings.values():
                meeting.barrier.abort()
        finally:
            world.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(sizes.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results
