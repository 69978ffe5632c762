"""A process group of a trainer and the ranks of one or several engines, over which new weights are broadcast.

The trainer is rank 0. The group has a store and a backend of its own, so that neither side's torch.distributed world is
touched. Used by workers, and by a trainer in its own process.
"""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from diptych.errors import Unavailable, Unsupported

# Not all of their names are in torch's type stubs.
_gloo: Any = dist.ProcessGroupGloo
_prefixed: Any = vars(dist)["PrefixStore"]
_tcp_store: Any = vars(dist)["TCPStore"]


class WeightsGroup:
    """One member of the group `name`; every member gives the same address, port, name and size.

    Args: address, port: where the trainer listens. rank: 0 for the trainer. backend: "gloo". timeout_s: for the meeting
    and for each broadcast. Raises: Unavailable if not all members meet in time; Unsupported for another backend.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        name: str = "weight_update_group",
        backend: str = "gloo",
        timeout_s: float = 60.0,
    ) -> None:
        if backend != "gloo":
            raise Unsupported(f"backend {backend!r} is not served for weight updates yet; use gloo", "backend")
        limit = timedelta(seconds=timeout_s)
        try:
            store = _tcp_store(address, port, world_size, is_master=rank == 0, timeout=limit)
            options = _gloo._Options()
            options._devices = [_device(address)]
            options._timeout = limit
            self._group = _gloo(_prefixed(f"diptych/{name}", store), rank, world_size, options)
        except RuntimeError as error:
            raise Unavailable(
                f"rank {rank} of {world_size} of group {name!r} did not meet the others at {address}:{port} within "
                f"{timeout_s:g} s: {_first_line(error)}"
            ) from error
        self.name = name
        self._store = store

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send `tensor` if this is the trainer, else fill it, contiguous and on the CPU. Raises: Unavailable if another
        member does not come; the group cannot be used any more.
        """
        try:
            self._group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()  # gloo does not know every dtype
        except RuntimeError as error:
            raise Unavailable(
                f"group {self.name!r} is broken, destroy it and init it anew: {_first_line(error)}"
            ) from error
        return tensor


def _device(address: str) -> Any:
    """The network device that reaches the trainer: what a host name leads to may not be reachable at all."""
    is_loopback = address == "localhost" or (_is_ip(address) and ipaddress.ip_address(address).is_loopback)
    if is_loopback:
        return _gloo.create_device(hostname="127.0.0.1")
    return _gloo.create_default_device()


def _is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
