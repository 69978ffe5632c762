"""Collectives as torch custom ops, so that a compiled graph keeps them as calls and knows their shapes.

An op finds its group by name: a graph can hold a string, not a process group. Groups enter and leave the one table
here; it belongs to the thread that runs the model.
"""

from __future__ import annotations

from typing import Protocol

import torch

from diptych.errors import InvariantError


class Collectives(Protocol):
    """What the ops call; `x` may be overwritten."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Join along `dim`, which is not negative."""
        ...

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share along `dim` of the sum."""
        ...


_groups: dict[str, Collectives] = {}


def enter(name: str, group: Collectives) -> None:
    """Make the group known under this name. Raises: InvariantError if the name is taken."""
    if name in _groups:
        raise InvariantError(f"there is a group {name!r} already; close it first")
    _groups[name] = group


def leave(name: str) -> None:
    """Forget the group; unknown names are ignored."""
    _groups.pop(name, None)


def _group(name: str) -> Collectives:
    found = _groups.get(name)
    if found is None:
        raise InvariantError(f"a compiled graph uses the group {name!r}, which is closed or was never opened")
    return found


@torch.library.custom_op("diptych::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum of `x` over the group's ranks; `x` is left alone."""
    return _group(group).all_reduce(x.clone(memory_format=torch.contiguous_format))


@all_reduce.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("diptych::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """The ranks' `x` joined along `dim`."""
    return _group(group).all_gather(x, dim)


@all_gather.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] * _group(group).size, *x.shape[dim + 1 :]))


@torch.library.custom_op("diptych::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """This rank's share along `dim` of the sum of `x`; `x` is left alone."""
    return _group(group).reduce_scatter(x.clone(memory_format=torch.contiguous_format), dim)


@reduce_scatter.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // _group(group).size, *x.shape[dim + 1 :]))
