"""Times each CPU kernel family, beside the torch reference, in one process and in turns.

python benchmarks/kernels.py [--threads N] [--set amx]. Prints the best of several runs: on a shared machine
the others say more about the neighbours. Shapes are those of Gemma 3 270M.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from diptych.kernels.attention import PagedAttention, StepShape
from diptych.kernels.library import kernels, set_num_threads
from diptych.kernels.linear import PackedLinear
from diptych.kernels.norm import FusedNorm
from diptych.kernels.reduce import argmax_rows
from diptych.layers.norm import rms_normalize

LAYERS = {"qkv": (1536, 640), "o": (640, 1024), "gate_up": (4096, 640), "down": (640, 2048), "head": (262144, 640)}


def best_of(function: Callable[[], object], count: int = 7) -> float:
    """Seconds of the fastest of `count` runs."""
    function()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def report(name: str, ours: Callable[[], object], torchs: Callable[[], object] | None, nbytes: int, flop: int) -> None:
    seconds = best_of(ours)
    rates = f"{nbytes / seconds / 1e9:7.1f} GB/s {flop / seconds / 1e9:8.1f} GFLOP/s"
    beside = "" if torchs is None else f"   torch {best_of(torchs) * 1e3:9.3f} ms"
    print(f"{name:28} {seconds * 1e3:9.3f} ms {rates}{beside}", flush=True)


def linears() -> None:
    for name, (outputs, inputs) in LAYERS.items():
        weight = torch.randn(outputs, inputs).bfloat16()
        packed = PackedLinear(weight.clone())
        for rows in (1, 4, 32) if name == "head" else (1, 4, 32, 1024):
            x = torch.randn(rows, inputs).bfloat16()
            report(
                f"linear {name} x {rows}",
                lambda packed=packed, x=x: packed(x),
                lambda weight=weight, x=x: F.linear(x, weight),
                2 * weight.numel(),
                2 * rows * weight.numel(),
            )


def norms() -> None:
    weight = torch.randn(640)
    norm = FusedNorm(weight, 1e-6, dtype=torch.bfloat16)
    for rows in (1, 32, 1024):
        x = torch.randn(rows, 640).bfloat16()
        nbytes = 2 * x.numel() * x.itemsize
        report(f"norm x {rows}", lambda x=x: norm(x), lambda x=x: rms_normalize(x, weight, 1e-6), nbytes, 4 * x.numel())


def attentions() -> None:
    for rows, query_len, kv_len in ((1, 1, 256), (1, 1, 4096), (32, 1, 256), (1, 1024, 1024)):
        num_pages = -(-kv_len // 16)
        pool = torch.randn(rows * num_pages, 2, 16, 1, 256).bfloat16()
        table = torch.arange(rows * num_pages, dtype=torch.int32).view(rows, num_pages)
        slots = table[:, 0, None].long() * 16 + torch.arange(kv_len - query_len, kv_len)
        shape = StepShape.of(
            query_starts=torch.arange(rows + 1, dtype=torch.int32) * query_len,
            kv_lens=torch.full((rows,), kv_len, dtype=torch.int32),
            page_table=table,
            kv_slots=slots.flatten(),
        )
        attention = PagedAttention(pool[:, 0], pool[:, 1], num_heads=4, scale=0.0625, window=None, soft_cap=None)
        query, key = torch.randn(rows * query_len, 4, 256).bfloat16(), torch.randn(rows * query_len, 1, 256).bfloat16()
        flop = 4 * 4 * 256 * rows * query_len * (kv_len if query_len == 1 else kv_len // 2)
        report(
            f"attention {rows} x {query_len} of {kv_len}",
            lambda attention=attention, query=query, key=key, shape=shape: attention(query, key, key, shape),
            None,
            rows * kv_len * 1024,
            flop,
        )


def reductions() -> None:
    for rows in (1, 32):
        logits = torch.randn(rows, 262144)
        report(
            f"argmax x {rows}",
            lambda logits=logits: argmax_rows(logits),
            lambda logits=logits: logits.argmax(1),
            logits.nbytes,
            0,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--set", help="instruction set; default: the best")
    arguments = parser.parse_args()
    library = kernels()
    if library is None or (arguments.set and not library.use(arguments.set)):
        raise SystemExit("no such kernels here")
    torch.set_num_threads(arguments.threads)
    set_num_threads(arguments.threads)
    print(f"{library.instruction_set}, {arguments.threads} threads")
    with torch.inference_mode():
        for family in (linears, norms, attentions, reductions):
            family()


if __name__ == "__main__":
    main()
