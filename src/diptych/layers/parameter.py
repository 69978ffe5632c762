"""Memory for weights, and filling it from a checkpoint with the shapes checked.

Knows nothing of models. Every layer allocates through `new_parameter` and reads through `fill`, so that a model built
on the meta device and loaded from a source of meta tensors checks all names and shapes without taking memory.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.errors import ConfigError
from diptych.kernels.memory import empty_weight
from diptych.layers.weights import WeightSource


def new_parameter(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised weight that takes no gradient."""
    on_cpu = torch.device(device).type == "cpu"
    memory = empty_weight(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(memory, requires_grad=False)


def read_checked(source: WeightSource, name: str, expected: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor `name`. Raises ConfigError if it is missing or its shape is not `expected`."""
    found = tuple(source.shape(name))
    if found != expected:
        raise ConfigError(
            f"tensor {name} has shape {list(found)}, the model's config asks for {list(expected)}: "
            "the weights and the config do not belong to the same model"
        )
    return source.read(name)


def fill(destination: torch.Tensor, source: WeightSource, name: str) -> None:
    """Copy tensor `name` into `destination` (a parameter or a slice of one), converting dtype and device.

    Raises ConfigError if the tensor is missing or has another shape.
    """
    weight = read_checked(source, name, tuple(destination.shape))
    with torch.no_grad():
        destination.copy_(weight)
