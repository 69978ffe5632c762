"""Weights in safetensors files, read by name and slice through a memory map."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from diptych.errors import ConfigError

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})


class SafetensorsSource:
    """A WeightSource over one or several safetensors files. Holds their maps until it is dropped.

    Args: files: as `find_safetensors` found and checked them.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._tensors: dict[str, tuple[Any, str]] = {}
        for file in files:
            handle = safe_open(file, framework="pt", device="cpu")
            for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                self._tensors[canonical_name(name)] = (handle, name)

    def names(self) -> list[str]:
        """Every tensor, under its canonical name."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape. Raises ConfigError if the tensor is missing or does not hold floating point numbers."""
        view = self._slice(name)
        kind = view.get_dtype()
        if kind not in FLOATS:
            raise ConfigError(
                f"tensor {name} is of type {kind}, as in quantised checkpoints, which are not supported; "
                "use the model's bfloat16 folder."
            )
        return tuple(view.get_shape())

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements start:stop along `dim`, in the file's dtype; may be a view of the map, so copy before writing."""
        index = (slice(None),) * dim + (slice(start, stop),)
        if self._slice(name).get_shape() == []:
            index = (Ellipsis,)
        tensor: torch.Tensor = self._slice(name)[index]
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._tensors:
            raise ConfigError(
                f"the checkpoint has no tensor {name}: its config.json and its weights do not belong together, "
                "or a file is missing."
            )
        handle, stored_name = self._tensors[name]
        return handle.get_slice(stored_name)


def canonical_name(name: str) -> str:
    """The name that a text-only model would use: multimodal checkpoints nest it, bare decoders leave out "model."."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        return "model." + name
    return name
