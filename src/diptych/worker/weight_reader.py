"""Reads tensors of a loaded model by name, each whole, wherever its parts are: in merged layers, packed, on any rank.

Every rank of the model reads what it holds; rank 0 puts it together. Worker's thread.
"""

from __future__ import annotations

import math

import msgspec
import torch

from diptych.core.calls import GetWeights, TensorBytes
from diptych.errors import InvariantError, RequestError
from diptych.kernels.packed_rows import PackedRows
from diptych.layers.shard import Part, Share
from diptych.layers.weights import Rows, WeightVisitor
from diptych.models.named_tensors import tensor_bytes
from diptych.models.transformer import Transformer
from diptych.parallel.groups import GroupCoordinator

MAX_READ_NBYTES = 128 * 1024 * 1024
_ITEM_NBYTES = 4


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """What one rank holds of the rows asked for: elements from `start` on of dimension `dim` of them."""

    tensor: TensorBytes
    dim: int
    start: int


def read_weights(
    model: Transformer,
    call: GetWeights,
    own_names: dict[str, str],
    *,
    shapes: dict[str, tuple[int, ...]],
    group: GroupCoordinator,
) -> list[TensorBytes]:
    """The tensors that `call` names, on rank 0 of `group`; nothing on the others.

    Args: own_names: the layers' names of them. shapes: of every tensor of the model, by these.
    Raises: RequestError for an unknown name or too many bytes, on all ranks alike.
    """
    missing = [name for name, own in own_names.items() if own not in shapes]
    if missing:
        raise RequestError(f"the model has no tensor {missing[0]!r}", param="names")
    rows = {own: range(*slice(call.start, call.stop).indices(shapes[own][0])) for own in own_names.values()}
    nbytes = sum(len(rows[own]) * math.prod(shapes[own][1:]) * _ITEM_NBYTES for own in own_names.values())
    if nbytes > MAX_READ_NBYTES:
        raise RequestError(
            f"these may be {nbytes} bytes, at most {MAX_READ_NBYTES} are read at once; ask for fewer rows",
            param="names",
        )
    reader = _Reader(rows)
    model.load(reader)
    pieces = reader.pieces
    if group.rank != 0:
        group.send_object(pieces, 0)
        return []
    for rank in range(1, group.size):
        pieces = pieces + group.recv_object(list[Piece], rank)
    return [_joined(name, own, shapes[own], rows[own], pieces=pieces) for name, own in own_names.items()]


class _Reader(WeightVisitor):
    """Copies rows of tensors. rows: which, of each whole tensor, by the layers' names."""

    def __init__(self, rows: dict[str, range]) -> None:
        self._rows = rows
        self.pieces: list[Piece] = []

    def visit(self, name: str, place: Rows, *, part: Part | None, offset: float) -> None:
        rows = self._rows.get(name)
        if rows is None:
            return
        dim = 0 if part is None else part.dim
        share = Share.whole(len(place)) if part is None else part.share
        first = share.start if dim == 0 else 0
        begin, end = max(rows.start - first, 0), min(rows.stop - first, len(place))
        if begin >= end:
            return
        some = place[begin:end]
        values = some.to_tensor() if isinstance(some, PackedRows) else some.detach().cpu()
        tensor = tensor_bytes(name, values - offset if offset else values)
        self.pieces.append(Piece(tensor, dim, first + begin - rows.start if dim == 0 else share.start))


def _joined(name: str, own: str, shape: tuple[int, ...], rows: range, *, pieces: list[Piece]) -> TensorBytes:
    """The rows of a tensor, from the pieces that there are of it; `shape` and `start` are the whole tensor's."""
    found = [piece for piece in pieces if piece.tensor.name == own]
    if not found:
        raise InvariantError(f"tensor {own} is known, but no layer loads it")
    dtype: torch.dtype = vars(torch)[found[0].tensor.dtype]
    whole = torch.empty((len(rows), *shape[1:]), dtype=dtype)
    for piece in found:
        values = torch.frombuffer(bytearray(piece.tensor.data), dtype=dtype).view(piece.tensor.shape)
        whole.narrow(piece.dim, piece.start, values.shape[piece.dim]).copy_(values)
    start = rows.start * math.prod(shape[1:]) * dtype.itemsize
    return msgspec.structs.replace(tensor_bytes(name, whole), shape=shape, start=start)
