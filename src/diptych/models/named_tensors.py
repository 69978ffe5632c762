"""Torch tensors on their way between programs and workers: as bytes, one by one, or flattened into one bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from diptych.core.calls import TensorBytes
from diptych.errors import RequestError


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One tensor of a bucket: which elements of it, and what they were."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start_idx: int
    end_idx: int


@dataclass(frozen=True, slots=True)
class FlattenedBucket:
    """Many tensors as one, so that a trainer gathers or copies once. flattened: uint8 [bytes of all]."""

    flattened: torch.Tensor
    entries: tuple[BucketEntry, ...]

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> FlattenedBucket:
        """Pack tensors of one device."""
        parts: list[torch.Tensor] = []
        entries: list[BucketEntry] = []
        start = 0
        for name, tensor in named_tensors:
            parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
            entries.append(BucketEntry(name, tensor.dtype, tuple(tensor.shape), start, start + len(parts[-1])))
            start += len(parts[-1])
        return cls(torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), tuple(entries))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors again, as views. Raises RequestError for an entry that does not fit the bucket."""
        for entry in self.entries:
            part = self.flattened[entry.start_idx : entry.end_idx]
            if len(part) != math.prod(entry.shape) * entry.dtype.itemsize:
                raise RequestError(f"tensor {entry.name} does not fit its place in the bucket", param="named_tensors")
            # Views must begin at a multiple of their element; a bucket packs them without gaps.
            yield entry.name, part.clone().view(entry.dtype).view(entry.shape)


def tensor_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    """A tensor's copy, from whatever device it is on."""
    memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return TensorBytes(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), memory.tobytes())


def as_bytes(named_tensors: Iterable[tuple[str, torch.Tensor]] | FlattenedBucket) -> Iterator[TensorBytes]:
    """What crosses to the engine, made one at a time. Raises: RequestError for what is no tensor."""
    pairs = named_tensors.tensors() if isinstance(named_tensors, FlattenedBucket) else named_tensors
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise RequestError(f"{name} is {type(tensor).__name__}, not a torch tensor", param="named_tensors")
        yield tensor_bytes(name, tensor)
