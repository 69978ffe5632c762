"""Filling weights from a source: in parts that add up, and refused when the shape is another."""

from __future__ import annotations

import pytest
import torch

from diptych.errors import ConfigError
from diptych.layers.parameter import fill


class RecordingSource:
    """One tensor "w"; notes which rows are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.reads: list[tuple[int, int | None]] = []

    def has(self, name: str) -> bool:
        return name == "w"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        assert dim == 0
        self.reads.append((start, stop))
        return self.tensor[start:stop]


def test_a_large_tensor_is_read_some_rows_at_a_time() -> None:
    source = RecordingSource(torch.arange(5).view(5, 1).expand(5, 1 << 21))
    destination = torch.empty(5, 1 << 21, dtype=torch.int8)
    fill(destination, source, "w")
    assert source.reads == [(0, 2), (2, 4), (4, 5)]
    assert torch.equal(destination[:, 17], torch.arange(5, dtype=torch.int8))


def test_a_small_one_at_once_and_converted() -> None:
    source = RecordingSource(torch.tensor([1.5, -2.0], dtype=torch.float64))
    destination = torch.empty(2, dtype=torch.bfloat16)
    fill(destination, source, "w")
    assert source.reads == [(0, 2)]
    assert destination.tolist() == [1.5, -2.0]


def test_on_the_meta_device_only_the_shape_counts() -> None:
    source = RecordingSource(torch.empty(1 << 20, 1 << 10, device="meta"))
    fill(torch.empty(1 << 20, 1 << 10, device="meta"), source, "w")
    assert len(source.reads) == 1


def test_another_shape_is_refused_before_anything_is_read() -> None:
    source = RecordingSource(torch.zeros(3, 4))
    with pytest.raises(ConfigError, match=r"\[3, 4\].*\[4, 3\]"):
        fill(torch.empty(4, 3), source, "w")
    assert source.reads == []
