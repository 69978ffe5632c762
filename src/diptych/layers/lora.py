"""Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) on top of linear layers, many in one step.

Owns what adapters in a fixed number of slots add to a layer. A step's rows come sorted by adapter, so that each adapter
has one segment of them. Knows nothing of files, names or requests. T = tokens, I = in features, O = out features, r =
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diptych.kernels.low_rank import AdaptedKernel, PackedLowRank, SegmentTable, StackSegments
from diptych.kernels.memory import Arena
from diptych.layers.linear import Linear

Segment = tuple[int, int, int]
"""First row, number of rows, and the slot of their adapter or -1."""


class StepAdapters:
    """Under which adapters the tokens of one step are. segments: all tokens, in order."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.table = SegmentTable(segments)

    def only(self, wanted: torch.Tensor) -> StepAdapters:
        """The same of some tokens alone: int64 [R], ascending."""
        bounds = np.array([begin for begin, _, _ in self.segments] + [sum(self.segments[-1][:2])])
        cuts = np.searchsorted(wanted.numpy(), bounds).tolist()
        kept = zip(cuts, cuts[1:], self.segments, strict=False)
        return StepAdapters([(begin, end - begin, slot) for begin, end, (_, _, slot) in kept if end > begin])

    def of_stack(self, wanted: torch.Tensor | None) -> StackSegments:
        """For a stack of layers whose last one goes on with the wanted tokens alone."""
        return StackSegments(self.table, self.table if wanted is None else self.only(wanted).table)


class ActiveAdapters:
    """The adapters of the step under way, which all layers of a model look at; None: no row has one."""

    def __init__(self) -> None:
        self.step: StepAdapters | None = None


@dataclass(frozen=True, slots=True)
class LowRank:
    """What one adapter adds to one projection: `scale * up @ (down @ x)`. down: [r, I]. up: [O, r]."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product of x [T, I] to out [T, O], in place."""
        out.add_((x @ self.down.T).mul_(self.scale) @ self.up.T)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.down.nbytes + self.up.nbytes


Prepared = LowRank | PackedLowRank
"""Ready to be put into a slot."""


class LinearAdapters:
    """What the adapters in `num_slots` slots add to one linear layer, which calls this before it computes.

    Args: part_sizes: outputs of each projection that the layer holds, in order.
    """

    def __init__(self, linear: Linear, part_sizes: Sequence[int], active: ActiveAdapters, *, num_slots: int) -> None:
        self._linear = linear
        self._sizes = tuple(part_sizes)
        self._active = active
        self._slots: list[Sequence[Prepared | None]] = [[None] * len(part_sizes) for _ in range(num_slots)]
        self.kernel = None if linear.packed is None else AdaptedKernel(linear.packed, part_sizes, num_slots)
        linear.adapters = self

    def prepare(self, part: LowRank, memory: Arena) -> Prepared:
        """A copy in the form in which this layer computes."""
        if self.kernel is not None:
            return PackedLowRank.of(part.down, part.up, part.scale, memory)
        weight = self._linear.weight
        down, up = (each.to(device=weight.device, dtype=weight.dtype, copy=True) for each in (part.down, part.up))
        return LowRank(down, up, part.scale)

    def put(self, slot: int, parts: Sequence[Prepared | None]) -> None:
        """Whose rows are in `slot` from now on: what is added to each part, None for nothing."""
        self._slots[slot] = parts
        if self.kernel is not None:
            self.kernel.put(slot, [part if isinstance(part, PackedLowRank) else None for part in parts])

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The layer's output for x [T, I] with the step's adapters; None where no row has one."""
        step = self._active.step
        if step is None:
            return None
        if self.kernel is not None:
            return self.kernel(x, step.table)
        out = self._linear.base(x)
        for begin, count, slot in step.segments:
            if slot >= 0:
                self._add(out[begin : begin + count], x[begin : begin + count], self._slots[slot])
        return out

    def _add(self, out: torch.Tensor, x: torch.Tensor, parts: Sequence[Prepared | None]) -> None:
        for columns, part in zip(out.split(self._sizes, dim=-1), parts, strict=True):
            if isinstance(part, LowRank):
                part.add_to(columns, x)
