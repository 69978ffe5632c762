"""Where a layer reads its weights from: the one door between layers and checkpoint formats.

Names are Hugging Face's ("model.layers.0.self_attn.q_proj.weight") whatever the file format. A layer pulls just what it
needs, so a tensor-parallel rank reads only its slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import torch

from diptych.errors import InvariantError
from diptych.kernels.gguf_linear import StoredBlocks
from diptych.kernels.packed_rows import PackedRows
from diptych.layers.shard import Part


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

    def blocks(self, name: str, part: Part) -> StoredBlocks | None:
        """Part of a matrix as the file holds it, to be computed in that form; None where it is to be read instead.

        Raises ConfigError naming the tensor if it is missing, or if that part is not whole blocks.
        """
        ...


Rows = torch.Tensor | PackedRows
"""Where a tensor's values are kept: a parameter, some of its rows, or rows of a packed one."""


class WeightVisitor(ABC):
    """Walks over a model's tensors where a source would fill them: `load` with a visitor shows it each name and place.

    So the layers' own loading code says which tensor is where, for reading and for replacing as well. It passes for a
    `WeightSource` that holds everything; a layer that reads past `fill` cannot be visited.
    """

    @abstractmethod
    def visit(self, name: str, place: Rows, *, part: Part | None, offset: float) -> None:
        """The tensor `name` plus `offset` is kept at `place`: all of it, or this rank's part."""

    def has(self, name: str) -> bool:
        """Every tensor that a layer asks for is there."""
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        """Nobody asks a visitor."""
        raise InvariantError(f"a layer loads {name} past `fill`, so that it can be neither read nor replaced")

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Nobody asks a visitor."""
        raise InvariantError(f"a layer loads {name} past `fill`, so that it can be neither read nor replaced")
