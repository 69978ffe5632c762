"""Which ranks form the groups of each axis, and on which node a rank runs. Pure arithmetic: no torch, no sockets.

An engine has tp * pp ranks. A pipeline stage is tp ranks in a row: rank = pp_rank * tp + tp_rank. Data parallelism
divides a stage: its dp groups attend to different sequences, each with tp / dp ranks, and meet again in the MLP, whose
collectives span the stage. Expert parallelism divides a stage otherwise: ep ranks hold different experts, each cut into
tp / ep slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from diptych.env import LeaderWorkerSet
from diptych.errors import ConfigError


class Axis(Enum):
    """A direction of the mesh: ranks that differ in it alone form a group."""

    TENSOR = "tensor"
    """The ranks of a pipeline stage: slices of the MLP, the vocabulary and the logits."""
    PIPELINE = "pipeline"
    """The same place in every stage."""
    DATA = "data"
    """The same attention slice in every data-parallel group of a stage."""
    ATTENTION = "attention"
    """The ranks of one data-parallel group: slices of attention."""
    EXPERT = "expert"
    """The same slice of different experts."""
    EXPERT_SLICE = "expert_slice"
    """The slices of the same experts."""
    WORLD = "world"
    """Every rank."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """How many ways each axis divides the work.

    Raises: ConfigError for a size below one, and where dp or ep does not divide tp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep)):
            if size < 1:
                raise ConfigError(f"{name}_size is {size}; it must be at least 1")
        for name, size in (("dp", self.dp), ("ep", self.ep)):
            if self.tp % size:
                raise ConfigError(f"{name}_size {size} does not divide tp_size {self.tp}; use a divisor of it")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp


_KEYS: dict[Axis, Callable[[MeshSizes, int, int], tuple[int, ...]]] = {
    Axis.TENSOR: lambda sizes, stage, place: (stage,),
    Axis.PIPELINE: lambda sizes, stage, place: (place,),
    Axis.DATA: lambda sizes, stage, place: (stage, place % (sizes.tp // sizes.dp)),
    Axis.ATTENTION: lambda sizes, stage, place: (stage, place // (sizes.tp // sizes.dp)),
    Axis.EXPERT: lambda sizes, stage, place: (stage, place % (sizes.tp // sizes.ep)),
    Axis.EXPERT_SLICE: lambda sizes, stage, place: (stage, place // (sizes.tp // sizes.ep)),
    Axis.WORLD: lambda sizes, stage, place: (),
}
"""What the ranks of one group have in common, from a rank's stage and its place in the stage."""


def axis_groups(sizes: MeshSizes, axis: Axis) -> list[tuple[int, ...]]:
    """All groups of an axis: each rank is in exactly one; ranks ascend within a group, groups by their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(sizes.world):
        groups.setdefault(_KEYS[axis](sizes, *divmod(rank, sizes.tp)), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's place. Raises: ConfigError for a rank outside the world."""

    sizes: MeshSizes
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.sizes.world:
            raise ConfigError(
                f"rank {self.rank} does not exist: tp_size {self.sizes.tp} x pp_size {self.sizes.pp} is a world of "
                f"{self.sizes.world}"
            )

    def group(self, axis: Axis) -> tuple[int, ...]:
        """World ranks of this rank's group, ascending."""
        return next(ranks for ranks in axis_groups(self.sizes, axis) if self.rank in ranks)

    def axis_rank(self, axis: Axis) -> int:
        """This rank's number within its group."""
        return self.group(axis).index(self.rank)

    def axis_size(self, axis: Axis) -> int:
        """Number of ranks in its group."""
        return len(self.group(axis))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.rank < self.sizes.tp

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.rank >= self.sizes.world - self.sizes.tp


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a world run: `world / nnodes` of them on each node, in order.

    Args: init_addr: "host:port" where they meet; node 0 listens there. None: one node, the launcher picks a place.
    """

    world: int
    nnodes: int = 1
    node_rank: int = 0
    init_addr: str | None = None

    def __post_init__(self) -> None:
        if self.nnodes < 1 or self.world % self.nnodes:
            raise ConfigError(f"{self.world} ranks cannot be dealt to nnodes {self.nnodes}; use a divisor")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node_rank {self.node_rank} is not below nnodes {self.nnodes}; nodes count from 0")
        if self.nnodes > 1 and self.init_addr is None:
            raise ConfigError(f"{self.nnodes} nodes need dist_init_addr, host:port of node 0")

    @property
    def local_size(self) -> int:
        """Ranks on each node."""
        return self.world // self.nnodes

    @property
    def local_ranks(self) -> range:
        """World ranks of this node."""
        return range(self.node_rank * self.local_size, (self.node_rank + 1) * self.local_size)

    def local_rank(self, rank: int) -> int:
        """A rank's number on its own node: which device is its."""
        return rank % self.local_size

    def is_one_node(self, ranks: tuple[int, ...]) -> bool:
        """Whether all of these ranks run on the same node."""
        return len({rank // self.local_size for rank in ranks}) == 1


def place(
    world: int,
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    init_addr: str | None = None,
    group: LeaderWorkerSet | None = None,
    default_port: int = 20000,
) -> Placement:
    """Where `world` ranks run: as the arguments say, and as Kubernetes' LeaderWorkerSet says where they say nothing.

    Args: group: `env.leader_worker_set()`. default_port: where the leader listens if only its name is known.
    Raises: ConfigError where both speak and differ in the number of nodes, and for what `Placement` refuses.
    """
    if group is None:
        return Placement(world=world, nnodes=nnodes or 1, node_rank=node_rank or 0, init_addr=init_addr)
    if nnodes not in (None, 1, group.group_size):
        raise ConfigError(
            f"nnodes is {nnodes} but LWS_GROUP_SIZE is {group.group_size}; leave --nnodes out, or make them equal"
        )
    if nnodes == 1:
        return Placement(world=world, node_rank=node_rank or 0, init_addr=init_addr)
    return Placement(
        world=world,
        nnodes=group.group_size,
        node_rank=group.worker_index if node_rank is None else node_rank,
        init_addr=init_addr or f"{group.leader_address}:{default_port}",
    )
