"""One rank of a group for the collectives' contract: a process that is asked over a pipe and answers what it found.

Run as a script: rank, world size, place to meet, timeout in seconds, "shm" or "gloo", stages. One line of JSON a
request or answer. Every rank can make every rank's tensors from a seed, and so knows what a collective must give.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

from diptych.errors import DiptychError
from diptych.kernels.library import kernels, set_num_threads
from diptych.parallel.mesh import Axis, Mesh, MeshSizes, Placement
from diptych.parallel.world import World, WorldOptions

Answer = dict[str, object]


class Point(msgspec.Struct):
    """A typed object to send."""

    name: str
    values: list[int]


def make(rank: int, shape: Iterable[int], dtype: str, seed: int) -> torch.Tensor:
    """Rank `rank`'s tensor: multiples of 1/64, with some large ones among them."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shape = tuple(shape)
    small = torch.randint(-256, 256, shape, generator=generator).float() / 64
    large = torch.randint(0, 50, shape, generator=generator) == 0
    x = torch.where(large, small * 100, small)
    return x.to(
        {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int64": torch.int64}[dtype]
    )


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """In float32, in rank order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def digest(x: torch.Tensor) -> str:
    """Of shape, dtype and bits."""
    bits = x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)
    return hashlib.sha256(f"{tuple(x.shape)} {x.dtype}".encode() + bits.numpy().tobytes()).hexdigest()[:16]


class Rank:
    """Carries requests out."""

    def __init__(self, world: World) -> None:
        self.world, self.group, self.rank = world, world.group(Axis.TENSOR), world.mesh.rank
        self.size = world.mesh.sizes.world

    def _parts(self, shape: list[int], dtype: str, seed: int) -> list[torch.Tensor]:
        return [make(rank, shape, dtype, seed) for rank in range(self.size)]

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor) -> Answer:
        return {
            "digest": digest(actual),
            "is_exact": digest(actual) == digest(expected),
            "error": float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0,
        }

    def all_reduce(self, shape: list[int], dtype: str, seed: int, transpose: bool = False) -> Answer:
        parts = self._parts(shape, dtype, seed)
        x = parts[self.rank].clone()
        if transpose:
            parts, x = [part.mT for part in parts], x.mT
        return self._compare(self.group.all_reduce(x), summed(parts))

    def all_gather(self, shape: list[int], dtype: str, seed: int, dim: int) -> Answer:
        parts = self._parts(shape, dtype, seed)
        return self._compare(self.group.all_gather(parts[self.rank], dim), torch.cat(parts, dim))

    def reduce_scatter(self, shape: list[int], dtype: str, seed: int, dim: int) -> Answer:
        parts = self._parts(shape, dtype, seed)
        expected = summed(parts).chunk(self.size, dim)[self.rank]
        return self._compare(self.group.reduce_scatter(parts[self.rank].clone(), dim), expected)

    def broadcast(self, shape: list[int], dtype: str, seed: int, src: int) -> Answer:
        x = make(self.rank, shape, dtype, seed)
        return self._compare(self.group.broadcast(x, src), make(src, shape, dtype, seed))

    def ring(self, shape: list[int], dtype: str, seed: int) -> Answer:
        """Even ranks send first, so that nobody waits in a circle."""
        steps: list[Callable[[], object]] = [
            lambda: self.group.send(make(self.rank, shape, dtype, seed)),
            lambda: self.group.recv(shape, make(0, [1], dtype, 0).dtype),
        ]
        results = [step() for step in (steps if self.rank % 2 == 0 else steps[::-1])]
        received = next(result for result in results if isinstance(result, torch.Tensor))
        return self._compare(received, make((self.rank - 1) % self.size, shape, dtype, seed))

    def tensor_dict(self, seed: int) -> Answer:
        """Rank 0 sends to rank 1."""
        entries = {
            "hidden": make(0, [5, 8], "bfloat16", seed),
            "empty": torch.empty(0, 4),
            "step": 7,
            "positions": make(0, [3], "int64", seed),
            "columns": make(0, [4, 6], "float32", seed).mT,
            "label": "prefill",
            "scale": None,
        }
        if self.rank == 0:
            self.group.send_tensor_dict(entries, 1).wait()
        if self.rank != 1:
            return {"is_exact": True}
        received = self.group.recv_tensor_dict(0)
        same = [
            digest(value) == digest(received[name]) if isinstance(value, torch.Tensor) else value == received[name]
            for name, value in entries.items()
        ]
        return {"is_exact": all(same) and received.keys() == entries.keys()}

    def sliced_tensor_dict(self, seed: int) -> Answer:
        """The last pipeline stage gets what the first has, each rank half of it."""
        tensor, pipeline = self.world.group(Axis.TENSOR), self.world.group(Axis.PIPELINE)
        entries = {"hidden": make(0, [6, 8], "bfloat16", seed), "odd": make(0, [3], "float32", seed)}
        if pipeline.is_first:
            sending = pipeline.send_tensor_dict(entries, all_gather_group=tensor)
            nbytes = [x.numel() for _, x in sending._under_way[2:]]
            sending.wait()
            return {"is_exact": nbytes == [48 // tensor.size, 3]}
        received = pipeline.recv_tensor_dict(all_gather_group=tensor)
        return {"is_exact": all(digest(received[name]) == digest(x) for name, x in entries.items())}

    def send_object(self, dst: int | None, value: Point) -> Answer:
        self.group.send_object(value, dst)
        return {}

    def recv_object(self, src: int | None, kind: str) -> Answer:
        return {"value": self.group.recv_object({"point": Point, "ints": list[int]}[kind], src)}

    def claim_to_be(self, claimed: int) -> Answer:
        """Send as somebody else."""
        self.group.rank, own = claimed, self.group.rank
        self.group.send_object(1, 1)
        self.group.rank = own
        return {}

    def compiled(self, seed: int) -> Answer:
        """A compiled graph has all three collectives as calls, and gives what the eager one gives."""
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            graphs.append(graph)
            return graph.forward

        def layer(x: torch.Tensor) -> torch.Tensor:
            x = self.group.all_reduce(x * 2)
            x = self.group.all_gather(x, 1) + 1
            return self.group.reduce_scatter(x, 0)

        x = make(self.rank, [4, 6], "float32", seed)
        eager = layer(x)
        answer = self._compare(torch.compile(layer, backend=keep, fullgraph=True)(x), eager)
        called = [str(node.target) for node in graphs[0].graph.nodes if "diptych" in str(node.target)]
        torch.library.opcheck(torch.ops.diptych.all_gather, (x, 1, self.group.name), test_utils="test_faketensor")
        return answer | {"called": called}

    def barrier(self, pause_s: float) -> Answer:
        time.sleep(pause_s * self.rank)
        self.group.barrier()
        return {"now": time.monotonic()}

    def latency(self, nbytes: int, count: int) -> Answer:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16)
        started = time.perf_counter()
        for _ in range(count):
            self.group.all_reduce(x)
        return {"us": (time.perf_counter() - started) / count * 1e6}

    def open_files(self) -> Answer:
        links = list(Path("/proc/self/fd").iterdir())
        names = [str(link.readlink()) for link in links if link.is_symlink()]
        maps = Path("/proc/self/maps").read_text()
        return {"open": [name for name in names if "diptych" in name], "mapped": maps.count("memfd:diptych")}

    def carried_by(self) -> Answer:
        carriers = self.group._carriers
        return {"shm": carriers is not None and carriers.shm is not None}

    def close(self) -> Answer:
        self.world.close()
        return {}


def open_world(rank: int, size: int, meeting: str, timeout_s: float, carrier: str, pp: int) -> World:
    options = WorldOptions(init_method=meeting, uses_shm=carrier != "gloo", timeout_s=timeout_s)
    mesh = Mesh(sizes=MeshSizes(tp=size // pp, pp=pp), rank=rank)
    return World(mesh, Placement(world=size), device=torch.device("cpu"), options=options)


def die_opening_a_segment(event: str, arguments: tuple[object, ...]) -> None:
    """kill -9 at the moment when another process's memory is opened."""
    if event == "open" and "/fd/" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serve until the pipe closes."""
    rank, size, meeting, timeout_s, carrier, pp = sys.argv[1:]
    if carrier == "shm-dies" and rank == "1":
        sys.addaudithook(die_opening_a_segment)
    torch.set_num_threads(1)
    kernels()
    set_num_threads(1)
    world = open_world(int(rank), int(size), meeting, float(timeout_s), carrier, int(pp))
    served = Rank(world)
    print(msgspec.json.encode({"pid": os.getpid()}).decode(), flush=True)
    for line in sys.stdin.buffer:
        what, arguments = msgspec.json.decode(line)
        if what == "send_object":
            arguments["value"] = msgspec.convert(arguments["value"], Point)
        started = time.monotonic()
        try:
            answer = getattr(served, what)(**arguments)
        except (DiptychError, ValueError, TypeError) as error:
            answer = {"raised": type(error).__name__, "message": str(error)}
        print(msgspec.json.encode(answer | {"took_s": time.monotonic() - started}).decode(), flush=True)
    world.close()


if __name__ == "__main__":
    main()
