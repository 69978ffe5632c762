"""The memory that a rank's weights and KV pages take: returned to the system for a while, and taken again.

Everything keeps its address, so that kernels and graphs that point there need not be built anew: on a CPU the system
takes the pages away under the tensors. Worker's thread.
"""

from __future__ import annotations

import tempfile
from typing import IO

import torch

from diptych import env
from diptych.core.calls import MemoryTag
from diptych.errors import DiptychError, RequestError, Unsupported
from diptych.kernels.memory import give_back, give_back_heap
from diptych.kernels.packed_rows import PackedRows
from diptych.kv.pool import KVPool
from diptych.layers.shard import Part
from diptych.layers.weights import Rows, WeightVisitor
from diptych.models.memory_source import bytes_of
from diptych.models.transformer import Transformer
from diptych.worker.weights import ModelWeights

_COPIED_AT_ONCE = 64 * 1024 * 1024


class Occupancy:
    """What of a rank's memory is released.

    Weights that are those of their checkpoint are read from it again; others, and those that are kept in a GGUF file's
    own blocks, wait in a file of the cache folder.
    """

    def __init__(self, model: Transformer, weights: ModelWeights, pool: KVPool) -> None:
        self._model = model
        self._weights = weights
        self._pool = pool
        self._released: set[MemoryTag] = set()
        self._spilled: IO[bytes] | None = None

    def free(self, tags: list[MemoryTag]) -> None:
        """Return memory. Raises: Unsupported on another device; RequestError if the weights cannot be kept; then
        nothing is released.
        """
        if self._pool.tensor.device.type != "cpu":
            raise Unsupported(f"memory on {self._pool.tensor.device} cannot be released yet; stop the engine instead")
        if "weights" in tags and "weights" not in self._released:
            self._free_weights()
        if "kv_cache" in tags and "kv_cache" not in self._released:
            give_back(self._pool.tensor)
            self._released.add("kv_cache")
        give_back_heap()

    def restore(self, tags: list[MemoryTag]) -> None:
        """Have memory again. Raises: RequestError if the weights cannot be read; they stay released."""
        if "weights" in tags and "weights" in self._released:
            self._restore_weights()
        self._released.difference_update(tags)

    def _free_weights(self) -> None:
        places = self._places()
        if not self._weights.is_on_disk:
            try:
                self._spilled = _spill(places)
            except OSError as error:
                raise RequestError(f"the weights cannot be kept while they are released: {error}", "tags") from error
        self._weights.is_released = True
        self._released.add("weights")
        for place in places:
            give_back(place)

    def _restore_weights(self) -> None:
        try:
            if self._spilled is None:
                self._weights.read_again()
            else:
                _fetch(self._spilled, self._places())
                self._spilled.close()
                self._spilled = None
        except (DiptychError, OSError) as error:
            raise RequestError(f"the weights cannot be read again: {error}", "tags") from error
        self._weights.is_released = False

    def _places(self) -> list[torch.Tensor]:
        """Every piece of memory that holds weights, once."""
        finder = _Finder()
        self._model.load(finder)
        return list(finder.places.values())


class _Finder(WeightVisitor):
    """Collects where weights are kept, by address."""

    def __init__(self) -> None:
        self.places: dict[int, torch.Tensor] = {}

    def visit(self, name: str, place: Rows, *, part: Part | None, offset: float) -> None:
        memory = place.memory if isinstance(place, PackedRows) else place.detach()
        self.places[memory.data_ptr()] = memory


def _spill(places: list[torch.Tensor]) -> IO[bytes]:
    """Copy to a file that has no name, and vanishes with the process."""
    folder = env.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (it lives until the weights are back)
    try:
        for place in places:
            memory = bytes_of(place)
            for start in range(0, len(memory), _COPIED_AT_ONCE):
                file.write(memory[start : start + _COPIED_AT_ONCE].data)
        file.flush()
    except OSError:
        file.close()
        raise
    return file


def _fetch(file: IO[bytes], places: list[torch.Tensor]) -> None:
    file.seek(0)
    for place in places:
        memory = bytes_of(place)
        if file.readinto(memory.data) != len(memory):  # type: ignore[attr-defined]
            raise OSError("the file that kept them is cut short")
