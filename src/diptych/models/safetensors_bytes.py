"""Tensors of a safetensors file that is in memory. Never imports torch."""

from __future__ import annotations

from typing import Any

import safetensors

from diptych.core.calls import TensorBytes
from diptych.errors import RequestError

_deserialize: Any = safetensors.deserialize
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def tensors_of_safetensors(data: bytes) -> list[TensorBytes]:
    """What a safetensors file holds. Raises RequestError for other bytes, or for tensors that are no weights."""
    try:
        entries: list[tuple[str, dict[str, Any]]] = _deserialize(data)
    except Exception as error:  # the library has no common class for what it raises
        raise RequestError(
            f"the tensors must be safetensors bytes (pickles are not read): {error}", param="serialized_named_tensors"
        ) from None
    tensors = []
    for name, entry in entries:
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise RequestError(f"tensor {name} is of type {entry['dtype']}; send BF16, F16 or F32", "named_tensors")
        tensors.append(TensorBytes(name, dtype, tuple(entry["shape"]), bytes(entry["data"])))
    return tensors
