"""The groups of ranks that a model's layers are dealt to, as one value that is handed to every layer.

A layer takes the group that it needs from it. Of one rank all groups are of one: nothing is called, nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.mesh import Axis
from diptych.parallel.world import World

ALONE = GroupCoordinator("alone", ranks=(0,), rank=0)
"""A group of one rank; it has no state."""


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """One rank's groups, by what they share.

    tensor: slices of the MLP, of the vocabulary and of the logits. attention: slices of attention over the same
    sequences; the tensor group itself unless there is data parallelism. data: the same slice of attention over other
    sequences. expert: other experts. expert_slice: slices of the same experts. pipeline: the other stages' layers.
    """

    tensor: GroupCoordinator = ALONE
    attention: GroupCoordinator = ALONE
    data: GroupCoordinator = ALONE
    expert: GroupCoordinator = ALONE
    expert_slice: GroupCoordinator = ALONE
    pipeline: GroupCoordinator = ALONE

    @classmethod
    def of(cls, world: World | None) -> LayerGroups:
        """Those of a rank of `world`; None: of a rank on its own."""
        if world is None:
            return ONE_RANK
        return cls(
            tensor=world.group(Axis.TENSOR),
            attention=world.group(Axis.ATTENTION),
            data=world.group(Axis.DATA),
            expert=world.group(Axis.EXPERT),
            expert_slice=world.group(Axis.EXPERT_SLICE),
            pipeline=world.group(Axis.PIPELINE),
        )

    @property
    def is_one_rank(self) -> bool:
        """Whether the model is whole on this rank."""
        return self.tensor.size == self.pipeline.size == 1


ONE_RANK = LayerGroups()
"""Of a rank that holds the whole model."""
