"""Data-parallel attention: layers whose weights all ranks of a stage share see the tokens of all groups.

Each data-parallel group attends to sequences of its own. Before a shared layer the groups' tokens are joined, each
padded to as many as the largest brings; after it every group takes its own. How many that is the scheduler says.
Worker's thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diptych.errors import InvariantError
from diptych.parallel.groups import GroupCoordinator


class TokenExchange:
    """What the groups bring to a step. Args: data: one rank of each group, in their order."""

    def __init__(self, data: GroupCoordinator) -> None:
        self._data = data
        self._num_tokens: list[int] = []
        self._num_rows: list[int] = []

    def begin_step(self, num_tokens: list[int], num_rows: list[int]) -> None:
        """Of every group: tokens, and rows whose logits are wanted. Raises: InvariantError if a group is missing."""
        if not len(num_tokens) == len(num_rows) == self._data.size:
            raise InvariantError(f"a step tells of {len(num_tokens)} groups, there are {self._data.size}")
        self._num_tokens, self._num_rows = num_tokens, num_rows

    def surround(self, layer: nn.Module) -> None:
        """Have a layer of [T, ...] see the tokens of all groups from now on."""
        self._surround(layer, lambda: self._num_tokens)

    def surround_head(self, head: nn.Module) -> None:
        """The same for one that sees only the rows whose logits are wanted."""
        self._surround(head, lambda: self._num_rows)

    def _surround(self, layer: nn.Module, counts: Any) -> None:
        layer.register_forward_pre_hook(lambda _, inputs: (self._join(inputs[0], counts()), *inputs[1:]))
        layer.register_forward_hook(lambda _, inputs, output: self._own(output, counts()))

    def _join(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[T, ...] of this group to [groups * T of the largest, ...] of all."""
        if x.shape[0] != counts[self._data.rank]:
            raise InvariantError(f"a group brings {x.shape[0]} tokens, its batch says {counts[self._data.rank]}")
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: x.shape[0]] = x
        return self._data.all_gather(padded, dim=0)

    def _own(self, joined: torch.Tensor, counts: list[int]) -> torch.Tensor:
        start = self._data.rank * max(counts)
        return joined[start : start + counts[self._data.rank]]
