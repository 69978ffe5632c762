"""Adapters over one model: which of its layers they may change, and the slots from which a step computes with them.

Knows nothing of requests, nor which adapter is in use; its caller says what goes into which slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diptych.errors import AdapterError
from diptych.kernels.low_rank import AdaptedLayer
from diptych.kernels.memory import Arena
from diptych.layers.linear import Linear, MergedLinear, RowLinear
from diptych.layers.lora import ActiveAdapters, LinearAdapters, LowRank, Prepared, StepAdapters
from diptych.layers.moe import MoE
from diptych.layers.shard import Share
from diptych.models.transformer import LayerBlocks, Transformer

PreparedAdapter = Sequence[Sequence[Prepared | None]]
"""One adapter ready for a slot: for each linear layer that adapters may change, each of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A linear layer that adapters may change. inputs, outputs: this rank's, the latter by the names of the modules."""

    linear: Linear
    inputs: Share
    outputs: dict[str, Share]
    adapters: LinearAdapters

    def part(self, name: str, whole: LowRank, path: str) -> LowRank:
        """This rank's slice of an adapter's module. What ranks add is summed with their parts of the layer's own sums.

        Raises: AdapterError unless `up @ down` has the shape of the base model's weight.
        """
        outputs = self.outputs[name]
        found, shape = [whole.up.shape[0], whole.down.shape[1]], [outputs.size, self.inputs.size]
        if found != shape:
            raise AdapterError(
                f"adapter {path} is for another model: its {name} is {found} (lora_B {list(whole.up.shape)}, lora_A "
                f"{list(whole.down.shape)}), the base model's is {shape}"
            )
        down = whole.down[:, self.inputs.start : self.inputs.stop]
        return LowRank(down, whole.up[outputs.start : outputs.stop], whole.scale)


class ModelAdapters:
    """`num_slots` places for adapters of `model`, all empty at first.

    The model must be loaded, packed if it will be, and have `layer_blocks`.
    """

    def __init__(self, model: Transformer, num_slots: int) -> None:
        blocks = model.layer_blocks
        assert blocks is not None, "this architecture has layers for which adapters have no place"
        self.num_slots = num_slots
        self.active = ActiveAdapters()
        self.targets = [
            _target(linear, names, self.active, num_slots=num_slots)
            for index, each in enumerate(blocks)
            for linear, names in _linears(each, f"model.layers.{index}")
        ]
        self._modules = frozenset(name for target in self.targets for name in target.outputs)
        model.take_adapters(self.active, self._adapted_layers() if model.is_fused else None)

    def prepare(self, modules: Mapping[str, LowRank], path: str) -> PreparedAdapter:
        """A copy of an adapter in the form in which the layers compute; changes nothing else.

        Raises: AdapterError naming a module that the model does not have, or a tensor of another shape.
        """
        unknown = sorted(set(modules) - self._modules)
        if unknown:
            served = sorted({name.rpartition(".")[2] for name in self._modules})
            raise AdapterError(
                f"adapter {path} changes {unknown[0]}, which is nothing that adapters may change here; "
                f"those are {', '.join(served)} of {len(self._modules) // len(served)} layers"
            )
        memory = Arena()
        parts = [
            [target.part(name, modules[name], path) if name in modules else None for name in target.outputs]
            for target in self.targets
        ]
        return [
            [None if part is None else target.adapters.prepare(part, memory) for part in each]
            for target, each in zip(self.targets, parts, strict=True)
        ]

    def put(self, slot: int, prepared: PreparedAdapter) -> None:
        """What `slot` holds from now on."""
        for target, parts in zip(self.targets, prepared, strict=True):
            target.adapters.put(slot, parts)

    def clear(self, slot: int) -> None:
        """Forget what a slot holds."""
        self.put(slot, [[None] * len(target.outputs) for target in self.targets])

    def begin_step(self, step: StepAdapters | None) -> None:
        """Under which adapters the next step's tokens are; None: all are the base model's."""
        self.active.step = step

    def _adapted_layers(self) -> list[AdaptedLayer]:
        kernels = [target.adapters.kernel for target in self.targets]
        found = [kernel for kernel in kernels if kernel is not None]
        return [AdaptedLayer(found[at : at + 4]) for at in range(0, len(found), 4)]


def _linears(blocks: LayerBlocks, prefix: str) -> list[tuple[Linear, list[str]]]:
    """A layer's GEMMs in the order of their use, with the full names of their parts; experts have none."""
    attention, mlp = blocks.attention, blocks.mlp
    attends: list[tuple[Linear, list[str]]] = [
        (attention.qkv, [f"{prefix}.self_attn.{name}" for name in attention.qkv.parts]),
        (attention.o_proj, [f"{prefix}.self_attn.o_proj"]),
    ]
    if isinstance(mlp, MoE):
        return attends
    return [
        *attends,
        (mlp.gate_up, [f"{prefix}.mlp.{name}" for name in mlp.gate_up.parts]),
        (mlp.down, [f"{prefix}.mlp.down_proj"]),
    ]


def _target(linear: Linear, names: list[str], active: ActiveAdapters, *, num_slots: int) -> Target:
    inputs = linear.inputs if isinstance(linear, RowLinear) else Share.whole(linear.in_features)
    shares = linear.shares.values() if isinstance(linear, MergedLinear) else [Share.whole(linear.out_features)]
    outputs = dict(zip(names, shares, strict=True))
    adapters = LinearAdapters(linear, [len(share) for share in shares], active, num_slots=num_slots)
    return Target(linear=linear, inputs=inputs, outputs=outputs, adapters=adapters)
