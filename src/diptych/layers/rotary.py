"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864).

Owns the arithmetic; which frequencies a model wants is the business of `models.rope`. Dimension i of a head is paired
with dimension i + D/2 (the "NeoX" order of Hugging Face checkpoints), or with its neighbour (DeepSeek). Cosines and
sines are computed in float32 from a step's positions, once for all layers, and rounded to the model's dtype: no table,
so no memory and no longest position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Rotation(NamedTuple):
    """Cosines, and sines with those of each pair's first half negated, of one step's positions: [T, 1, D] each."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate [T, heads, D] by its tokens' positions, into a new tensor; every product rounds to the dtype."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * rotation.cos).add_(swapped.mul_(rotation.signed_sin))


def rotate_pairs(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """The same where neighbours are pairs; the rotation is of an interleaved `RotaryEmbedding`, and sets the dtype."""
    swapped = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (heads * rotation.cos).add_(swapped * rotation.signed_sin)


class RotaryEmbedding(nn.Module):
    """Turns positions, int64 [T], into the rotation that `rotate` applies in every layer of the step.

    Args: inverse_frequencies: float32 [D / 2], radians a token. magnitude: factor on cosines and sines. is_interleaved:
    for `rotate_pairs`.
    """

    inverse_frequencies: torch.Tensor

    def __init__(
        self,
        inverse_frequencies: torch.Tensor,
        magnitude: float = 1.0,
        *,
        is_interleaved: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.magnitude = magnitude
        self.is_interleaved = is_interleaved
        self.dtype = dtype
        self.register_buffer("inverse_frequencies", inverse_frequencies.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        angles = torch.outer(positions.to(torch.float32), self.inverse_frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos.mul_(self.magnitude)
            sin.mul_(self.magnitude)
        return Rotation(self._both(cos, cos).unsqueeze(1), self._both(-sin, sin).unsqueeze(1))

    def _both(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """[T, D] of what applies to the first and to the second dimension of each pair, [T, D / 2] each."""
        if self.is_interleaved:
            return torch.stack((first, second), dim=-1).flatten(1).to(self.dtype)
        return torch.cat((first, second), dim=-1).to(self.dtype)
