"""`GroupCoordinator`: what the ranks of one axis say to each other. Layers and workers talk to it alone.

Ranks are numbers within the group. Every rank must make the same calls in the same order, with the same shapes. A group
of one has no process group behind it: collectives return their input. Used by the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from diptych.errors import InvariantError
from diptych.parallel import frames, ops
from diptych.parallel.carriers import Carriers
from diptych.parallel.frames import Scalar, TensorDictRecord, TensorRecord

T = TypeVar("T")


@dataclass(kw_only=True)
class Sending:
    """Messages under way. Their tensors must not be overwritten before `wait` has returned."""

    carriers: Carriers
    dst: int
    _under_way: list[tuple[dist.Work | None, torch.Tensor]] = field(default_factory=list)

    def add(self, x: torch.Tensor) -> None:
        """Begin to send one more tensor; an empty one is skipped."""
        if x.numel():
            self._under_way.append(self.carriers.start_sending(x, self.dst))

    def wait(self) -> None:
        """Until all has left (on a GPU: until the stream may overwrite it). Raises: RankLost."""
        while self._under_way:
            work, _ = self._under_way.pop(0)
            if work is not None:
                self.carriers.call(f"send to rank {self.dst}", work.wait)


class GroupCoordinator:
    """One rank's seat in a group.

    Args: ranks: world ranks of the group, in its order. rank: this one's number in it. carriers: None for a group of
        one.
    Raises: ValueError for a rank that is not in the group.
    """

    def __init__(self, name: str, *, ranks: Sequence[int], rank: int, carriers: Carriers | None = None) -> None:
        if not 0 <= rank < len(ranks):
            raise ValueError(f"rank {rank} is not in the {name} group, which has {len(ranks)} ranks")
        if (carriers is None) != (len(ranks) == 1):
            raise ValueError(
                f"the {name} group has {len(ranks)} ranks; carriers are for more than one, and then needed"
            )
        self.name, self.ranks, self.rank, self.size = name, tuple(ranks), rank, len(ranks)
        self._carriers = carriers
        if carriers is not None:
            ops.enter(name, carriers)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank of the group."""
        return self.rank == self.size - 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks. `x` may be overwritten: use the result alone. Raises: RankLost."""
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.diptych.all_reduce(x, self.name)
        return self._open_carriers().all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors joined along `dim`, in rank order. Raises: RankLost; ValueError for a dim `x` lacks."""
        dim = self._dim(x, dim)
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.diptych.all_gather(x, dim, self.name)
        return self._open_carriers().all_gather(x, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's share along `dim` of the sum. `x` may be overwritten.

        Raises: RankLost; ValueError for a dim that `x` lacks or that the ranks cannot share evenly.
        """
        dim = self._dim(x, dim)
        if x.shape[dim] % self.size:
            raise ValueError(f"dim {dim} of {tuple(x.shape)} cannot be dealt to {self.size} ranks evenly; pad it first")
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.diptych.reduce_scatter(x, dim, self.name)
        return self._open_carriers().reduce_scatter(x, dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank `src`'s tensor, in `x`, which is contiguous. Raises: RankLost; ValueError for a wrong rank."""
        self._check_rank("src", src)
        return x if self.size == 1 else self._open_carriers().broadcast(x, src)

    def send(self, x: torch.Tensor, dst: int | None = None) -> None:
        """Send one tensor; None: to the next rank. Raises: RankLost; ValueError for a wrong rank."""
        sending = self._sending(dst)
        sending.add(x)
        sending.wait()

    def recv(self, shape: Sequence[int], dtype: torch.dtype, *, src: int | None = None) -> torch.Tensor:
        """The tensor that rank `src` sends, on the group's device; None: from the rank before.

        Raises: RankLost; ValueError for a wrong rank.
        """
        carriers, src = self._source(src)
        return _receive(carriers, torch.empty(tuple(shape), dtype=dtype, device=carriers.device), src)

    def send_object(self, value: object, dst: int | None = None) -> None:
        """Send a value that msgspec can encode, through the device group: length, then bytes.

        Raises: RankLost; ValueError for a wrong rank or a value that is too large.
        """
        sending = self._sending(dst)
        for part in frames.encode(value, src=self.rank, dst=sending.dst):
            sending.add(part.to(sending.carriers.object_device))
        sending.wait()

    def recv_object(self, value_type: type[T], src: int | None = None) -> T:
        """The value that rank `src` sends, checked to be a `value_type` and from that rank.

        Raises: RankLost; ValueError for a wrong rank; InvariantError for anything else that arrives.
        """
        carriers, src = self._source(src)
        return self._receive_object(carriers, value_type, src, carriers.object_device)

    def send_tensor_dict(
        self,
        entries: dict[str, torch.Tensor | Scalar],
        dst: int | None = None,
        *,
        all_gather_group: GroupCoordinator | None = None,
    ) -> Sending:
        """Begin to send tensors and plain values under their names: what they are over the CPU, then each tensor.

        Args: all_gather_group: ranks that all hold these very tensors and send to ranks that form such a group too.
            Each then sends its share of every tensor that divides evenly, and the receivers put them together.
        Raises: RankLost; ValueError for a wrong rank or a dtype that cannot travel.
        """
        sending = self._sending(dst)
        slices = 1 if all_gather_group is None else all_gather_group.size
        record = frames.record_of(entries, slices)
        for part in frames.encode(record, src=self.rank, dst=sending.dst):
            sending.add(part)
        for described in record.tensors:
            x = entries[described.name]
            assert isinstance(x, torch.Tensor)
            if described.num_slices > 1 and all_gather_group is not None:
                x = x.reshape(described.num_slices, -1)[all_gather_group.rank]
            sending.add(x)
        return sending

    def recv_tensor_dict(
        self, src: int | None = None, *, all_gather_group: GroupCoordinator | None = None
    ) -> dict[str, torch.Tensor | Scalar]:
        """What rank `src` sends with `send_tensor_dict`; device tensors come to this group's device.

        Raises: RankLost; ValueError for a wrong rank; InvariantError if the sender sliced for a group of another size.
        """
        carriers, src = self._source(src)
        record = self._receive_object(carriers, TensorDictRecord, src, torch.device("cpu"))
        entries: dict[str, torch.Tensor | Scalar] = dict(record.values)
        for described in record.tensors:
            device = torch.device("cpu") if described.is_on_cpu else carriers.device
            entries[described.name] = _receive_share(carriers, described, src, device, all_gather_group)
        return entries

    def barrier(self) -> None:
        """Wait until every rank is here (the host's thread; a GPU may still compute). Raises: RankLost."""
        if self.size > 1:
            self._open_carriers().barrier()

    def close(self) -> None:
        """Leave the group. May be called twice."""
        if self._carriers is not None:
            ops.leave(self.name)
            self._carriers.close()
            self._carriers = None

    def _dim(self, x: torch.Tensor, dim: int) -> int:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}")
        return dim % x.dim()

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{what} {rank} is not in the {self.name} group, whose ranks are 0 to {self.size - 1}")

    def _peer(self, what: str, rank: int) -> Carriers:
        self._check_rank(what, rank)
        if rank == self.rank:
            raise ValueError(f"{what} {rank} is this rank itself in the {self.name} group; name another")
        return self._open_carriers()

    def _open_carriers(self) -> Carriers:
        if self._carriers is None:
            raise InvariantError(f"the {self.name} group of {self.size} ranks is closed")
        return self._carriers

    def _sending(self, dst: int | None) -> Sending:
        dst = (self.rank + 1) % self.size if dst is None else dst
        return Sending(carriers=self._peer("dst", dst), dst=dst)

    def _source(self, src: int | None) -> tuple[Carriers, int]:
        src = (self.rank - 1) % self.size if src is None else src
        return self._peer("src", src), src

    def _receive_object(self, carriers: Carriers, value_type: type[T], src: int, device: torch.device) -> T:
        header = carriers.receive(torch.empty(frames.HEADER_LEN, dtype=torch.int64, device=device), src)
        nbytes = frames.payload_nbytes(header.tolist(), src=src, dst=self.rank)
        payload = carriers.receive(torch.empty(nbytes, dtype=torch.uint8, device=device), src)
        return frames.decode(payload.cpu(), value_type, src=src)


def _receive(carriers: Carriers, x: torch.Tensor, src: int) -> torch.Tensor:
    """Nothing is sent of an empty tensor, so nothing is awaited."""
    return carriers.receive(x, src) if x.numel() else x


def _receive_share(
    carriers: Carriers, described: TensorRecord, src: int, device: torch.device, group: GroupCoordinator | None
) -> torch.Tensor:
    """One tensor of a dictionary, put together with the other ranks of `group` if it came in slices."""
    slices, dtype = described.num_slices, described.torch_dtype
    if slices == 1:
        return _receive(carriers, torch.empty(described.shape, dtype=dtype, device=device), src)
    if group is None or group.size != slices:
        raise InvariantError(
            f"tensor {described.name!r} was sliced for {slices} ranks, but the receiver's all-gather group has "
            f"{1 if group is None else group.size}; both ends must pass groups of one size"
        )
    share = torch.empty(torch.Size(described.shape).numel() // slices, dtype=dtype, device=device)
    return group.all_gather(carriers.receive(share, src), 0).view(described.shape)
