"""Microbenchmarks of the decode kernels on Llama-3.1-8B shapes: one table of microseconds and bytes a second.

Each figure is the median of several replays of one CUDA graph that runs the kernel over the weights (or KV) of many
layers in turn, so that the L2 cache never holds what comes next.

    python benchmarks/h200/kernels.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from diptych.kernels.cuda.decode_attention import decode_attention, decode_workspace, plan_decode
from diptych.kernels.cuda.heads import prepare_heads
from diptych.kernels.cuda.small_linear import small_linear

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
EPS = 1e-5
CONTEXTS = {
    "1 x 128": [128],
    "1 x 600": [600],
    "1 x 8192": [8192],
    "1 x 131072": [131072],
    "8 x 1000": [1000] * 8,
    "64 x 600": [600] * 64,
    "64 x 4096": [4096] * 64,
    "256 x 320": [320] * 256,
    "256 x 1152": [1152] * 256,
    "60000 + 127 x 200": [60000] + [200] * 127,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table; nbytes is what the kernel must read."""

    name: str
    microseconds: float
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name:<44} {self.microseconds:9.2f} us {self.nbytes / self.microseconds / 1e6:6.2f} TB/s"


def new(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(spread)


def replay_microseconds(run: Callable[[], None], *, replays: int = 9) -> float:
    """Median time of one replay of a graph of `run`."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


SHAPES = {
    "qkv": (6144, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCABULARY, HIDDEN),
}
NORMED = ("qkv", "gate_up", "lm_head")
ADDED = ("o_proj", "down")


def linears() -> Iterator[Figure]:
    """Each projection of a layer and the output head: ours with all that is fused into it, and cuBLAS alone."""
    for name, (outputs, inputs) in SHAPES.items():
        nbytes = 2 * outputs * inputs
        weights = [new(outputs, inputs, spread=inputs**-0.5) for _ in range(max(2, 2**30 // nbytes))]
        for rows in (1, 2, 4, 8, 16, 32):
            for kind, run in (("", ours(name, rows, weights)), (", cuBLAS alone", cublas(rows, weights))):
                microseconds = replay_microseconds(run) / len(weights)
                yield Figure(name=f"{name}, M = {rows}{kind}", microseconds=microseconds, nbytes=nbytes)


def ours(name: str, rows: int, weights: list[torch.Tensor]) -> Callable[[], None]:
    outputs, inputs = weights[0].shape
    x, norm_weight = new(rows, inputs), new(inputs) if name in NORMED else None
    out = new(rows, outputs // 2 if name == "gate_up" else outputs)

    def run() -> None:
        for weight in weights:
            small_linear(
                x,
                weight,
                out=out,
                norm_weight=norm_weight,
                norm_eps=EPS,
                gate="silu" if name == "gate_up" else None,
                residual=out if name in ADDED else None,
            )

    return run


def cublas(rows: int, weights: list[torch.Tensor]) -> Callable[[], None]:
    x, out = new(rows, weights[0].shape[1]), new(rows, weights[0].shape[0])

    def run() -> None:
        for weight in weights:
            torch.mm(x, weight.T, out=out)

    return run


class Cache:
    """A page-major KV pool of some layers and one batch over it, pages in random order."""

    def __init__(self, lengths: list[int], num_layers: int) -> None:
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        self.num_layers = num_layers
        self.pool = new(sum(counts), num_layers, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        pages = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        self.page_table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True).cuda()
        self.kv_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.workspace = decode_workspace(
            len(lengths), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, device=self.pool.device
        )

    def plan(self) -> None:
        plan_decode(self.kv_lens, self.workspace)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        decode_attention(
            query,
            self.pool[:, layer, 0],
            self.pool[:, layer, 1],
            page_table=self.page_table,
            kv_lens=self.kv_lens,
            out=out,
            scale=HEAD_DIM**-0.5,
            workspace=self.workspace,
            plan_is_settled=layer > 0,
        )


def attentions() -> Iterator[Figure]:
    """The attention of one layer over many layers' KV, and the plan that all layers of a step share."""
    for name, lengths in CONTEXTS.items():
        layer_nbytes = 4 * KV_HEADS * HEAD_DIM * sum(lengths)
        cache = Cache(lengths, max(2, min(32, 2**30 // layer_nbytes)))
        query, out = (new(len(lengths), HEADS, HEAD_DIM) for _ in range(2))

        def plans(cache: Cache = cache) -> None:
            for _ in range(16):
                cache.plan()

        def layers(cache: Cache = cache, query: torch.Tensor = query, out: torch.Tensor = out) -> None:
            for layer in range(cache.num_layers):
                cache.attend(layer, query, out)

        plan_us = replay_microseconds(plans) / 16
        microseconds = replay_microseconds(layers) / cache.num_layers
        yield Figure(name=f"attention, {name} (plan {plan_us:.1f} us)", microseconds=microseconds, nbytes=layer_nbytes)


def whole_step() -> Figure:
    """One token of one sequence through 32 layers and the output head: everything that reads weights or KV."""
    weights = {
        name: [new(*shape, spread=0.01) for _ in range(32)] for name, shape in SHAPES.items() if name != "lm_head"
    }
    head, cache, norm_weight = new(*SHAPES["lm_head"], spread=0.01), Cache([600], 32), new(HIDDEN)
    cos, sin = (torch.randn(1, HEAD_DIM // 2, device="cuda") for _ in range(2))
    slot = torch.tensor([599], device="cuda")
    hidden, attended, inner, logits = (new(1, size) for size in (HIDDEN, HIDDEN, INTERMEDIATE, VOCABULARY))
    heads = new(1, SHAPES["qkv"][0])

    def run() -> None:
        cache.plan()
        for layer in range(32):
            small_linear(hidden, weights["qkv"][layer], out=heads, norm_weight=norm_weight, norm_eps=EPS)
            prepare_heads(
                heads,
                cos,
                sin,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                key_cache=cache.pool[:, layer, 0],
                value_cache=cache.pool[:, layer, 1],
                kv_slots=slot,
            )
            cache.attend(layer, heads[:, :HIDDEN].view(1, HEADS, HEAD_DIM), attended.view(1, HEADS, HEAD_DIM))
            small_linear(attended, weights["o_proj"][layer], out=hidden, residual=hidden)
            small_linear(
                hidden, weights["gate_up"][layer], out=inner, norm_weight=norm_weight, norm_eps=EPS, gate="silu"
            )
            small_linear(inner, weights["down"][layer], out=hidden, residual=hidden)
        small_linear(hidden, head, out=logits, norm_weight=norm_weight, norm_eps=EPS)

    nbytes = sum(weight.nbytes for layers in weights.values() for weight in layers) + head.nbytes
    return Figure(name="one step of one sequence, context 600", microseconds=replay_microseconds(run), nbytes=nbytes)


def main() -> None:
    torch.manual_seed(0)
    for figure in linears():
        print(figure, flush=True)
    for figure in attentions():
        print(figure, flush=True)
    print(whole_step())


if __name__ == "__main__":
    main()
