"""Adapters in the CPU kernels: right to bfloat16, and a row's bits are its own whatever rows are beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_decoder_layer import RAGGED, ragged_inputs, tiny_model

from diptych.attention.cpu import CPUAttention
from diptych.kernels.linear import Activation, PackedLinear
from diptych.kernels.low_rank import AdaptedKernel, PackedLowRank, SegmentTable
from diptych.kernels.memory import Arena
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.layers.lora import LowRank, StepAdapters
from diptych.models.adapters import ModelAdapters
from diptych.models.transformer import DecoderLayer

COUNTS = [count for count, _ in RAGGED]
STARTS = [0, *itertools.accumulate(COUNTS)]


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.mark.parametrize("gated", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", [(48, 16, 16), (40, 40)])
@pytest.mark.parametrize("rank", [1, 16, 40])
def test_sums_with_adapters(instruction_set: str, rank: int, sizes: tuple[int, ...], gated: Activation | None) -> None:
    """Segments of 1, 70 and 3 rows under different adapters, one of which changes one part alone."""
    sizes = (sizes[0], sizes[0]) if gated else sizes
    weight = random(sum(sizes), 72, seed=1)
    adapted = AdaptedKernel(PackedLinear(weight.clone(), gated=gated), sizes, num_slots=2)
    parts = [
        [(random(rank, 72, seed=10 * slot + part, scale=0.1), random(size, rank, seed=50 * slot + part), 0.5 + slot)]
        for slot in range(2)
        for part, size in enumerate(sizes)
    ]
    pairs = [[parts[slot * len(sizes) + part][0] for part in range(len(sizes))] for slot in range(2)]
    memory = Arena()
    packed = [[PackedLowRank.of(*pair, memory) for pair in slot] for slot in pairs]
    adapted.put(0, packed[0])
    adapted.put(1, [None, *packed[1][1:]])
    x = random(80, 72, seed=3)
    segments = [(0, 5, -1), (5, 1, 0), (6, 70, 1), (76, 4, 0)]
    found = adapted(x, SegmentTable(segments)).float()
    sums = x.float() @ weight.float().T
    for begin, count, slot in segments:
        rows, column = slice(begin, begin + count), 0
        for index, size in enumerate(sizes):
            if slot == 0 or (slot == 1 and index > 0):
                down, up, scale = pairs[slot][index]
                narrow = (scale * (x[rows].float() @ down.float().T)).bfloat16().float()
                sums[rows, column : column + size] += narrow @ up.float().T
            column += size
    expected = sums
    if gated is not None:
        gate, up = sums.split(sizes, dim=1)
        activated = (
            torch.nn.functional.silu(gate) if gated == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        expected = activated * up
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item() / 10)


class AdaptedSteps:
    """A tiny model with three adapters of different rank, over RAGGED steps."""

    def __init__(self, architecture: str) -> None:
        self.model = tiny_model(architecture)
        self.adapters = ModelAdapters(self.model, 3)
        for slot, rank in enumerate([4, 16, 40]):
            modules = {
                name: LowRank(
                    random(rank, target.linear.in_features, seed=len(name) + slot, scale=0.1),
                    random(len(share), rank, seed=len(name) + 7 * slot, scale=0.1),
                    2.0,
                )
                for target in self.adapters.targets
                for name, share in target.outputs.items()
            }
            self.adapters.put(slot, self.adapters.prepare(modules, "here"))

    @torch.inference_mode()
    def hidden(self, slots: list[int] | None, *, is_wanted_alone: bool = False) -> torch.Tensor:
        pool = KVPool(
            KVLayout.single_rank(3, 2, head_dim=32, page_size=16, dtype="bfloat16"),
            240,
            torch.device("cpu"),
            torch.bfloat16,
        )
        pool.tensor.copy_(torch.randint(-3, 3, pool.tensor.shape, generator=torch.Generator().manual_seed(0)))
        rows = None if slots is None else list(zip(STARTS, COUNTS, slots, strict=False))
        self.adapters.begin_step(None if rows is None else StepAdapters(rows))
        run = self.model.forward_logit_rows if is_wanted_alone else self.model.forward
        return run(ragged_inputs([0, 1, 3, 5]), CPUAttention(pool))


def row(hidden: torch.Tensor, index: int) -> torch.Tensor:
    return hidden[STARTS[index] : STARTS[index + 1]]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM"])
def test_a_rows_bits_are_its_own(instruction_set: str, architecture: str) -> None:
    steps = AdaptedSteps(architecture)
    base, mixed = steps.hidden(None), steps.hidden([-1, 0, 1, 2, 2, -1])
    other = steps.hidden([2, 0, -1, 1, 2, 0])
    assert torch.equal(steps.hidden([-1] * 6), base)
    for index in (0, 5):
        assert torch.equal(row(mixed, index), row(base, index))
    for index in (1, 4):
        assert torch.equal(row(mixed, index), row(other, index)) and not torch.equal(
            row(mixed, index), row(base, index)
        )
    wanted = ragged_inputs([0, 1, 3, 5]).logit_rows
    assert torch.equal(steps.hidden([-1, 0, 1, 2, 2, -1], is_wanted_alone=True), mixed[wanted])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_fused_layers_are_their_parts(instruction_set: str, architecture: str) -> None:
    steps = AdaptedSteps(architecture)
    fused = steps.hidden([-1, 0, 1, 2, 2, -1])
    for layer in steps.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.fused = None
    steps.model.take_adapters(steps.adapters.active, None)
    assert torch.equal(steps.hidden([-1, 0, 1, 2, 2, -1]), fused)


def test_an_emptied_slot_adds_nothing() -> None:
    steps = AdaptedSteps("LlamaForCausalLM")
    base = steps.hidden(None)
    steps.adapters.clear(1)
    assert torch.equal(steps.hidden([1] * 6), base)
