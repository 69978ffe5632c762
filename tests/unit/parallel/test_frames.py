"""What ranks say ahead of tensors: made, read, and refused."""

from __future__ import annotations

import pytest
import torch

from diptych.errors import InvariantError
from diptych.parallel import frames
from diptych.parallel.frames import TensorDictRecord, TensorRecord


def test_an_object_comes_back_as_it_was() -> None:
    header, payload = frames.encode({"a": [1, 2]}, src=0, dst=3)
    assert frames.payload_nbytes(header.tolist(), src=0, dst=3) == payload.numel()
    assert frames.decode(payload, dict[str, list[int]], src=0) == {"a": [1, 2]}


def test_another_sender_or_receiver_is_named() -> None:
    header, _ = frames.encode(1, src=2, dst=1)
    with pytest.raises(InvariantError, match="from rank 2 for rank 1 arrived where rank 1 awaits one from rank 0"):
        frames.payload_nbytes(header.tolist(), src=0, dst=1)
    with pytest.raises(InvariantError, match="for rank 1 arrived where rank 0 awaits"):
        frames.payload_nbytes(header.tolist(), src=2, dst=0)


@pytest.mark.parametrize("nbytes", [0, -1, frames.MAX_OBJECT_NBYTES + 1])
def test_sizes_are_bounded_before_anything_is_allocated(nbytes: int) -> None:
    header, _ = frames.encode(1, src=0, dst=1)
    header[3] = nbytes
    with pytest.raises(InvariantError, match="something else than an object"):
        frames.payload_nbytes(header.tolist(), src=0, dst=1)


def test_what_is_no_header_is_refused() -> None:
    with pytest.raises(InvariantError, match="something else than an object"):
        frames.payload_nbytes([1, 0, 1, 5], src=0, dst=1)


def test_objects_that_are_too_large_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_OBJECT_NBYTES", 10)
    with pytest.raises(ValueError, match="an object of 21 bytes cannot be sent; at most 10"):
        frames.encode("x" * 20, src=0, dst=1)


def test_a_value_of_another_type_is_refused() -> None:
    _, payload = frames.encode("text", src=4, dst=1)
    with pytest.raises(InvariantError, match=r"rank 4 sent an object that is no <class 'int'>"):
        frames.decode(payload, int, src=4)


def test_a_dictionary_is_described_in_order() -> None:
    entries = {"b": torch.zeros(4, 2, dtype=torch.bfloat16), "n": 3, "a": torch.zeros(3), "none": torch.zeros(0, 2)}
    assert frames.record_of(entries, 2) == TensorDictRecord(
        tensors=[
            TensorRecord("b", "bfloat16", (4, 2), True, 2),
            TensorRecord("a", "float32", (3,), True, 1),
            TensorRecord("none", "float32", (0, 2), True, 1),
        ],
        values={"n": 3},
    )


def test_dtypes_that_cannot_travel_are_named() -> None:
    with pytest.raises(ValueError, match="tensor 'z' has dtype complex64, which cannot be sent"):
        frames.record_of({"z": torch.zeros(1, dtype=torch.complex64)}, 1)
    with pytest.raises(InvariantError, match="'z' has dtype 'complex64', which this rank does not know"):
        _ = TensorRecord("z", "complex64", (1,), True, 1).torch_dtype
