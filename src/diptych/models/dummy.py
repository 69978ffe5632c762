"""Random weights for a configuration: `--load-format dummy`, for benchmarks and tests without a checkpoint.

The same seed gives the same weights, whatever is read first and however it is sliced.
"""

from __future__ import annotations

import math
import zlib

import torch

from diptych.errors import ConfigError
from diptych.models.config import TransformerConfig
from diptych.models.shapes import tensor_shapes

PERIOD = 1048573
"""Random numbers drawn for a tensor; they repeat after this prime, so that no two rows of a matrix are alike."""

NORM_NOISE = 0.02


class DummySource:
    """A WeightSource that makes up every tensor the configuration implies, at scales that keep logits near 1."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes = tensor_shapes(config)
        self._gemma = config.architecture.startswith("Gemma3")
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def names(self) -> list[str]:
        """Every tensor of the model."""
        return list(self._shapes)

    def has(self, name: str) -> bool:
        """Whether the model has this tensor."""
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape. Raises ConfigError for a tensor that the configuration does not imply."""
        if name not in self._shapes:
            raise ConfigError(f"a model of this configuration has no tensor {name}, so no dummy weights for it.")
        return self._shapes[name]

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements start:stop along `dim`, in the source's dtype and on its device."""
        shape = self.shape(name)
        begin, end, _ = slice(start, stop).indices(shape[dim])
        if dim != 0:
            return self.read(name).narrow(dim, begin, end - begin)
        row_len = math.prod(shape[1:])
        return self._values(name, begin * row_len, end * row_len).view(end - begin, *shape[1:])

    def _values(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements begin:end of the flattened tensor."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        center, spread = self._distribution(name)
        period = min(PERIOD, math.prod(self._shapes[name]))
        pattern = torch.empty(period).normal_(center, spread, generator=generator).to(self._dtype)
        pattern = pattern.to(self._device)  # repeated where it is wanted: a GPU fills its memory faster than a host can
        offset = begin % period
        return pattern.repeat(-(-(offset + end - begin) // period))[offset : offset + end - begin]

    def _distribution(self, name: str) -> tuple[float, float]:
        """Mean and deviation: norms are near one (near zero in Gemma, which adds one), matrices keep variance."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return (0.0 if self._gemma else 1.0), NORM_NOISE
        if len(shape) == 1:
            return 0.0, NORM_NOISE
        return 0.0, 1.0 / math.sqrt(shape[1])
