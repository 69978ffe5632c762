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
from diptych.layers.weights import BlockSource, WeightSource

_FILL_NUMEL = 1 << 22


def new_parameter(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised weight that takes no gradient."""
    on_cpu = torch.device(device).type == "cpu"
    memory = empty_weight(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(memory, requires_grad=False)


def read_checked(source: WeightSource, name: str, expected: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor `name`. Raises ConfigError if it is missing or its shape is not `expected`."""
    _check_shape(source, name, expected)
    return source.read(name)


def _check_shape(source: WeightSource, name: str, expected: tuple[int, ...]) -> None:
    found = tuple(source.shape(name))
    if found != expected:
        raise ConfigError(
            f"tensor {name} has shape {list(found)}, the model's config asks for {list(expected)}: "
            "the weights and the config do not belong to the same model"
        )


def fill(destination: torch.Tensor, source: WeightSource, name: str) -> None:
    """Copy tensor `name` into `destination` (a parameter or a slice of one), converting dtype and device.

    Some rows at a time: a source may have to expand what it reads, and an embedding twice would be the most memory that
    the process ever has. Raises ConfigError if the tensor is missing or has another shape.
    """
    _check_shape(source, name, tuple(destination.shape))
    num_rows = len(destination)
    step = num_rows if destination.is_meta else max(1, _FILL_NUMEL * num_rows // destination.numel())
    with torch.no_grad():
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            destination[start:stop].copy_(source.read(name, start=start, stop=stop))


def stored_blocks(source: WeightSource, sizes: dict[str, int]) -> tuple[StoredBlocks, ...] | None:
    """Matrices of one layer that their file holds as blocks, to be computed as they are; None if any is to be read.

    Args: sizes: tensor names, and the outputs of each.
    """
    if not isinstance(source, BlockSource) or any(size % BLOCK_OUTPUTS != 0 for size in list(sizes.values())[:-1]):
        return None
    found = [source.blocks(name) for name in sizes]
    return tuple(part for part in found if part is not None) if None not in found else None


def without_memory(weight: nn.Parameter) -> nn.Parameter:
    """What stands for a weight of the same dtype and device whose values are kept elsewhere."""
    return nn.Parameter(weight.new_empty((0, *weight.shape[1:])), requires_grad=False)
