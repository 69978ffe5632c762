"""Tensors cut into buckets that fit a frame, values as numbers, and words for memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.core.calls import TensorBytes
from diptych.errors import RequestError
from diptych.server.upkeep import buckets, float_values, memory_tags


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 30))
def test_buckets_hold_every_byte_in_order(contents: list[bytes], nbytes: int) -> None:
    tensors = [TensorBytes(f"t{index}", "int8", (len(data),), data) for index, data in enumerate(contents)]
    seen = {tensor.name: b"" for tensor in tensors}
    for bucket in buckets(tensors, nbytes):
        assert bucket and sum(len(piece.data) for piece in bucket) <= nbytes
        for piece in bucket:
            assert piece.start == len(seen[piece.name])
            seen[piece.name] += piece.data
    assert list(seen.values()) == contents


def test_values_as_numbers() -> None:
    halves = TensorBytes("t", "bfloat16", (1, 2), bytes([0x80, 0x3F, 0x00, 0xC0]))
    assert float_values(halves).tolist() == [[1.0, -2.0]]
    for dtype in ("float16", "float32", "float64"):
        values = np.array([0.5, -3.0], dtype=dtype)
        assert float_values(TensorBytes("t", dtype, (2,), values.tobytes())).tolist() == [0.5, -3.0]


def test_memory_tags() -> None:
    assert memory_tags(["kv_cache", "weights", "kv_cache"]) == ["kv_cache", "weights"]
    assert sorted(memory_tags([])) == ["kv_cache", "weights"], "none, as SGLang has it, are all"
    with pytest.raises(RequestError, match="got 'cuda_graph'"):
        memory_tags(["weights", "cuda_graph"])
