"""Tensors on their way: buckets give back what went in, bytes are what safetensors reads, the rest is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from diptych.core.calls import TensorBytes
from diptych.errors import RequestError
from diptych.models.named_tensors import FlattenedBucket, as_bytes, tensor_bytes
from diptych.models.safetensors_bytes import tensors_of_safetensors

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.arange(8.0).view(2, 4).T,
    "empty": torch.empty(0, 4),
}


def test_a_bucket_gives_back_its_tensors() -> None:
    bucket = FlattenedBucket.of(TENSORS.items())
    assert bucket.flattened.dtype == torch.uint8
    found = dict(bucket.tensors())
    assert list(found) == list(TENSORS)
    for name, values in TENSORS.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values)
    assert list(as_bytes(bucket)) == list(as_bytes(TENSORS.items()))


def test_a_bucket_whose_entries_do_not_fit_is_refused() -> None:
    bucket = FlattenedBucket.of(TENSORS.items())
    broken = FlattenedBucket(bucket.flattened[:20], bucket.entries)
    with pytest.raises(RequestError, match="tensor a does not fit"):
        list(broken.tensors())


def test_bytes_are_row_by_row() -> None:
    assert tensor_bytes("c", TENSORS["c"]) == TensorBytes(
        "c", "float32", (4, 2), TENSORS["c"].contiguous().numpy().tobytes()
    )
    with pytest.raises(RequestError, match="x is list, not a torch tensor"):
        list(as_bytes([("x", [1.0])]))  # type: ignore[list-item]


def test_safetensors_bytes() -> None:
    tensors = {name: values.contiguous() for name, values in TENSORS.items()}
    found = {tensor.name: tensor for tensor in tensors_of_safetensors(save(tensors))}
    assert found == {name: tensor_bytes(name, values) for name, values in tensors.items()}
    with pytest.raises(RequestError, match="pickles are not read"):
        tensors_of_safetensors(b"\x80\x04\x95")
    with pytest.raises(RequestError, match="is of type I32"):
        tensors_of_safetensors(save({"i": torch.zeros(2, dtype=torch.int32)}))
