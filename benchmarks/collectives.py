"""Times the collectives of CPU ranks: ours over shared memory beside gloo's, in the same processes and in turns.

python benchmarks/collectives.py [--ranks 2] [--json FILE]. Both are called the way a layer calls them, through a
GroupCoordinator. A round times one carrier right after the other. A line's times are medians over rounds of the slowest
rank; its ratio is the median of the rounds' ratios, which a busy neighbour upsets least.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from diptych.kernels.library import kernels, set_num_threads
from diptych.parallel.carriers import Carriers
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.mesh import Axis, Mesh, MeshSizes, Placement
from diptych.parallel.world import World, WorldOptions

SIZES = [8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20]
TARGET = 3.0
ROUND_S = 0.02


def seconds_per_call(call: Callable[[], object], count: int) -> float:
    """Mean of `count` calls on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        call()
    took = torch.tensor([(time.perf_counter() - started) / count], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def calls(group: GroupCoordinator, nbytes: int) -> dict[str, Callable[[], object]]:
    """What is timed. nbytes: of one rank's tensor."""
    bfloat16 = torch.zeros(64, nbytes // 128, dtype=torch.bfloat16)
    float32 = torch.zeros(64, nbytes // 256)
    return {
        "allreduce bf16": lambda: group.all_reduce(bfloat16),
        "allreduce fp32": lambda: group.all_reduce(float32),
        "allgather bf16 dim 0": lambda: group.all_gather(bfloat16, 0),
        "allgather bf16 dim 1": lambda: group.all_gather(bfloat16, 1),
    }


def measure(rounds: int, groups: dict[str, GroupCoordinator]) -> list[dict[str, object]]:
    """One row a size and collective."""
    rows: list[dict[str, object]] = []
    for nbytes in SIZES:
        timed = {name: calls(group, nbytes) for name, group in groups.items()}
        for what in timed["shm"]:
            counts = {}
            for name, known in timed.items():
                known[what]()
                counts[name] = max(3, min(500, int(ROUND_S / seconds_per_call(known[what], 5))))
            times: dict[str, list[float]] = {name: [] for name in timed}
            for _ in range(rounds):
                for name, known in timed.items():
                    times[name].append(seconds_per_call(known[what], counts[name]))
            ratios = [gloo / shm for gloo, shm in zip(times["gloo"], times["shm"], strict=True)]
            rows.append(
                {"collective": what, "nbytes": nbytes, "ratio": statistics.median(ratios)}
                | {f"{name}_us": statistics.median(found) * 1e6 for name, found in times.items()}
                | {f"best_{name}_us": min(found) * 1e6 for name, found in times.items()}
            )
    return rows


def run_rank(rank: int, arguments: argparse.Namespace, meeting: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    library = kernels()
    set_num_threads(1)
    mesh = Mesh(sizes=MeshSizes(tp=arguments.ranks), rank=rank)
    options = WorldOptions(init_method=meeting)
    with World(mesh, Placement(world=arguments.ranks), device=torch.device("cpu"), options=options) as world:
        ours = world.group(Axis.TENSOR)
        carriers = Carriers(name="gloo", device=torch.device("cpu"), cpu_group=dist.new_group(backend="gloo"))
        plain = GroupCoordinator("gloo", ranks=ours.ranks, rank=rank, carriers=carriers)
        rows = measure(arguments.rounds, {"gloo": plain, "shm": ours})
        if rank == 0:
            print(f"{arguments.ranks} ranks, {library.instruction_set if library else 'no kernels'}, one thread each")
            report(rows)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def report(rows: list[dict[str, object]]) -> None:
    """The table, and whether the target is met."""
    print(f"{'collective':22}{'KB':>7}{'gloo us':>11}{'shm us':>11}{'ratio':>8}{'best gloo':>11}{'best shm':>11}")
    for row in rows:
        print(
            f"{row['collective']:22}{row['nbytes'] // 1024:>7}{row['gloo_us']:>11.1f}{row['shm_us']:>11.1f}"
            f"{row['ratio']:>8.1f}{row['best_gloo_us']:>11.1f}{row['best_shm_us']:>11.1f}"
        )
    missed = [row for row in rows if row["ratio"] < TARGET]
    print(f"target of {TARGET:.0f}x met" if not missed else f"below {TARGET:.0f}x: {len(missed)} of {len(rows)} lines")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kernels()  # compiled once, before the ranks look for it
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        ranks = [context.Process(target=run_rank, args=(rank, arguments, meeting)) for rank in range(arguments.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
