"""Where a layer reads its weights from: the one door between layers and checkpoint formats.

Names are Hugging Face's ("model.layers.0.self_attn.q_proj.weight") whatever the file format. A layer pulls just what it
needs, so a tensor-parallel rank reads only its slice.
"""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Named tensors of one checkpoint."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape. Raises ConfigError naming the tensor if it is missing."""
        ...

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements start:stop along `dim` (default: all), on the CPU, in the file's dtype.

        A quantised file is expanded to the dtype that its source was opened for. The result may be a view of the file.

        Raises ConfigError naming the tensor if it is missing.
        """
        ...
