"""What ranks send each other ahead of tensors: a header of three numbers, then msgpack. Typed; no pickle.

Knows no process group: `groups` carries what is made here.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch

from diptych.errors import InvariantError

T = TypeVar("T")

Scalar = bool | int | float | str | None

MAX_OBJECT_NBYTES = 256 * 1024 * 1024
HEADER_LEN = 4
_MAGIC = 0x6469707479636801

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a dictionary. num_slices: over how many ranks it was divided for the journey; 1: whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_on_cpu: bool
    num_slices: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises: InvariantError for a name that is no dtype of ours."""
        found = _DTYPES.get(self.dtype)
        if found is None:
            raise InvariantError(f"tensor {self.name!r} has dtype {self.dtype!r}, which this rank does not know")
        return found


class TensorDictRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a dictionary holds, in the order of its tensors."""

    tensors: list[TensorRecord]
    values: dict[str, Scalar]


def record_of(entries: dict[str, torch.Tensor | Scalar], num_slices: int) -> TensorDictRecord:
    """Describes a dictionary; tensors that `num_slices` ranks can share evenly are marked to be sliced.

    Raises: ValueError for a dtype that cannot travel.
    """
    tensors, values = [], {}
    for name, entry in entries.items():
        if not isinstance(entry, torch.Tensor):
            values[name] = entry
            continue
        dtype = str(entry.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(
                f"tensor {name!r} has dtype {dtype}, which cannot be sent; use one of {', '.join(_DTYPES)}"
            )
        slices = num_slices if entry.numel() and entry.numel() % num_slices == 0 else 1
        tensors.append(TensorRecord(name, dtype, tuple(entry.shape), entry.device.type == "cpu", slices))
    return TensorDictRecord(tensors, values)


def encode(value: object, *, src: int, dst: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Header (int64) and bytes (uint8) of one value on the CPU.

    Raises: ValueError for a value that is too large; TypeError for one that msgpack cannot say.
    """
    encoded = bytearray(msgspec.msgpack.encode(value))
    if len(encoded) > MAX_OBJECT_NBYTES:
        raise ValueError(f"an object of {len(encoded)} bytes cannot be sent; at most {MAX_OBJECT_NBYTES}")
    return torch.tensor([_MAGIC, src, dst, len(encoded)]), torch.frombuffer(encoded, dtype=torch.uint8)


def payload_nbytes(header: list[int], *, src: int, dst: int) -> int:
    """Size of the bytes that follow a header.

    Raises: InvariantError if it is no header, or from or for another rank: the ranks are out of step.
    """
    magic, sender, receiver, nbytes = header
    if magic != _MAGIC or not 0 < nbytes <= MAX_OBJECT_NBYTES:
        raise InvariantError(f"rank {src} sent something else than an object to rank {dst}, which awaits one: {header}")
    if (sender, receiver) != (src, dst):
        raise InvariantError(
            f"an object from rank {sender} for rank {receiver} arrived where rank {dst} awaits one from rank {src}"
        )
    return nbytes


def decode(payload: torch.Tensor, value_type: type[T], *, src: int) -> T:
    """The value in these bytes. Raises: InvariantError if they are no `value_type`."""
    try:
        return msgspec.msgpack.decode(payload.numpy().tobytes(), type=value_type)
    except msgspec.MsgspecError as error:
        raise InvariantError(f"rank {src} sent an object that is no {value_type}: {error}") from error
