"""Where a layer reads its weights from: the one door between layers and checkpoint formats.

Names are Hugging Face's ("model.layers.0.self_attn.q_proj.weight") whatever the file format. A layer pulls just what it
needs, so a tensor-parallel rank reads only its slice.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from diptych.kernels.gguf_linear import StoredBlocks


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


@runtime_checkable
class BlockSource(WeightSource, Protocol):
    """A source of matrices that may be computed in the form in which their file quantised them."""

    def blocks(self, name: str) -> StoredBlocks | None:
        """The matrix as the file holds it, to be computed in that form; None where it is to be read instead.

        Raises ConfigError naming the tensor if it is missing.
        """
        ...
