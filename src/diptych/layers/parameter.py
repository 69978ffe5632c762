"""Memory for weights, and filling it from a checkpoint with the shapes checked.

Knows nothing of models. Every layer allocates through `new_parameter` and reads through `fill`, so that a model built
on the meta device and loaded from a source of meta tensors checks all names and shapes without taking memory.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.errors import ConfigError
from diptych.kernels.gguf_linear import StoredBlocks
from diptych.kernels.linear import BLOCK_OUTPUTS
from diptych.kernels.memory import empty_weight
from diptych.layers.shard import Part
from diptych.layers.weights import BlockSource, Rows, WeightSource, WeightVisitor

_FILL_NUMEL = 1 << 22


def new_parameter(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised weight that takes no gradient."""
    on_cpu = torch.device(device).type == "cpu"
    memory = empty_weight(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(memory, requires_grad=False)


def _check_shape(source: WeightSource, name: str, expected: tuple[int, ...]) -> None:
    found = tuple(source.shape(name))
    if found != expected:
        raise ConfigError(
            f"tensor {name} has shape {list(found)}, the model's config asks for {list(expected)}: "
            "the weights and the config do not belong to the same model"
        )


def fill(destination: Rows, source: WeightSource, name: str, *, part: Part | None = None, offset: float = 0.0) -> None:
    """Copy tensor `name`, plus `offset`, into `destination` (a parameter or rows of one), converting dtype and device.

    A visitor is shown the destination instead. Some rows at a time: a source may have to expand what it reads, and an
    embedding twice would be the most memory that the process ever has. Args: part: what of the tensor is wanted, and
    read; None: all. Raises ConfigError if the tensor is missing or has another shape.
    """
    if isinstance(source, WeightVisitor):
        source.visit(name, destination, part=part, offset=offset)
        return
    _check_shape(source, name, _whole_shape(destination, part))
    with torch.no_grad():
        if part is not None and part.dim != 0:
            read = source.read(name, dim=part.dim, start=part.share.start, stop=part.share.stop)
            destination.copy_(read)
        else:
            _fill_rows(destination, source, name, first=0 if part is None else part.share.start)
        if offset:
            destination.add_(offset)  # in the destination's dtype, which may be the wider


def _whole_shape(destination: Rows, part: Part | None) -> tuple[int, ...]:
    """Of the tensor whose part is kept at `destination`."""
    shape = list(destination.shape)
    if part is not None:
        shape[part.dim] = part.share.size
    return tuple(shape)


def _fill_rows(destination: Rows, source: WeightSource, name: str, *, first: int) -> None:
    """Read a tensor's rows from `first` on."""
    num_rows = len(destination)
    step = num_rows if destination.is_meta else max(1, _FILL_NUMEL * num_rows // destination.numel())
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        destination[start:stop].copy_(source.read(name, start=first + start, stop=first + stop))


def stored_blocks(source: WeightSource, parts: dict[str, Part]) -> tuple[StoredBlocks, ...] | None:
    """Matrices of one layer that their file holds as blocks, to be computed as they are; None if any is to be read.

    Args: parts: what is wanted of each tensor, by name.
    """
    num_outputs = [len(part.share) for part in parts.values() if part.dim == 0]
    if not isinstance(source, BlockSource) or any(count % BLOCK_OUTPUTS != 0 for count in num_outputs[:-1]):
        return None
    found = [source.blocks(name, part) for name, part in parts.items()]
    return tuple(blocks for blocks in found if blocks is not None) if None not in found else None


def without_memory(weight: nn.Parameter) -> nn.Parameter:
    """What stands for a weight of the same dtype and device whose values are kept elsewhere."""
    return nn.Parameter(weight.new_empty((0, *weight.shape[1:])), requires_grad=False)
