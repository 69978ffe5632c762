"""Linear layers over few rows against float32 torch."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from diptych.kernels.cuda.row_linear import RowConfig
from diptych.kernels.cuda.small_linear import MAX_SMALL_ROWS, small_linear
from diptych.kernels.cuda.tile_linear import TileConfig
from diptych.layers.norm import rms_normalize

pytestmark = pytest.mark.gpu

Gate = Literal["silu", "gelu_tanh"]
EPS = 1e-5


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    gate: Gate | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What small_linear computes, float32, but for the one rounding at its end."""
    if norm_weight is not None:
        x = rms_normalize(x, norm_weight, EPS)
    y = x.double() @ weight.double().T
    if bias is not None:
        y += bias
    if gate is not None:
        gates, ups = y.chunk(2, dim=-1)
        y = (F.silu(gates) if gate == "silu" else F.gelu(gates, approximate="tanh")) * ups
    return (y if residual is None else y + residual).float()


def new(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=device) * spread).to(dtype)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, MAX_SMALL_ROWS, 33, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 64), (1016, 320), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("extras", [False, True])
def test_agrees_with_torch(
    device: torch.device, num_rows: int, num_outputs: int, num_inputs: int, extras: bool
) -> None:
    torch.manual_seed(num_rows)
    x = new(device, num_rows, num_inputs)
    weight = new(device, num_outputs, num_inputs, spread=num_inputs**-0.5)
    bias = new(device, num_outputs) if extras else None
    residual = new(device, num_rows, num_outputs) if extras else None
    expected = reference(x, weight, bias=bias, residual=residual)
    out = torch.full((num_rows, num_outputs), float("nan"), dtype=torch.bfloat16, device=device)
    if residual is not None:
        out = residual
    small_linear(x, weight, out=out, bias=bias, residual=residual)
    assert relative_error(out, expected) < 3e-3


@pytest.mark.parametrize("num_rows", [1, 2, 5, MAX_SMALL_ROWS])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(24, 192), (2048, 1024), (28672, 4096)])
def test_fuses_norm_and_activation(
    device: torch.device,
    num_rows: int,
    gate: Gate | None,
    norm_dtype: torch.dtype | None,
    num_outputs: int,
    num_inputs: int,
) -> None:
    torch.manual_seed(num_outputs + num_rows)
    x = new(device, num_rows, num_inputs, spread=3.0)
    weight = new(device, num_outputs, num_inputs, spread=num_inputs**-0.5)
    norm_weight = None if norm_dtype is None else new(device, num_inputs, dtype=norm_dtype)
    columns = num_outputs if gate is None else num_outputs // 2
    out = torch.full((num_rows, columns), float("nan"), dtype=torch.bfloat16, device=device)
    small_linear(x, weight, out=out, norm_weight=norm_weight, norm_eps=EPS, gate=gate)
    # The inverse of the root mean square is summed in another order, which moves some bfloat16 inputs by one place.
    assert relative_error(out, reference(x, weight, norm_weight=norm_weight, gate=gate)) < 4e-3


@pytest.mark.parametrize(
    "config",
    [
        RowConfig(4, 256, 2),
        RowConfig(8, 512, 4, prefetch=True),
        RowConfig(2, 1024, 4, per_processor=2, prefetch=True),
        RowConfig(4, 1024, 4, per_processor=1),
        TileConfig(16, 128, 4, 3),
        TileConfig(64, 128, 4, 4, prefetch_k=512),
        TileConfig(128, 64, 8, 4, prefetch_k=1024),
    ],
)
def test_any_configuration_gives_the_same(device: torch.device, config: RowConfig | TileConfig) -> None:
    torch.manual_seed(3)
    x, weight, norm_weight = new(device, 1, 704), new(device, 5000, 704, spread=0.04), new(device, 704)
    out = torch.full((1, 2500), float("nan"), dtype=torch.bfloat16, device=device)
    small_linear(x, weight, out=out, norm_weight=norm_weight, norm_eps=EPS, gate="silu", config=config)
    assert relative_error(out, reference(x, weight, norm_weight=norm_weight, gate="silu")) < 4e-3


@pytest.mark.parametrize("num_rows", [1, 4])
def test_same_inputs_give_the_same_bits(device: torch.device, num_rows: int) -> None:
    x, weight = new(device, num_rows, 4096), new(device, 4096, 4096, spread=0.02)
    outs = [torch.empty(num_rows, 4096, dtype=torch.bfloat16, device=device) for _ in range(20)]
    for out in outs:
        small_linear(x, weight, out=out)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_chain_in_a_graph_sees_each_result(device: torch.device) -> None:
    """Every kernel starts early and must still wait for what it reads: the output of the one in front of it."""
    torch.manual_seed(5)
    weights = new(device, 24, 2048, 2048, spread=2048**-0.5)
    hidden = new(device, 1, 2048)
    buffers = [torch.empty_like(hidden) for _ in range(25)]

    def chain() -> None:
        buffers[0].copy_(hidden)
        for layer in range(24):
            small_linear(buffers[layer], weights[layer], out=buffers[layer + 1], residual=buffers[layer])

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        hidden.copy_(new(device, 1, 2048))
        graph.replay()
        for layer in range(24):
            expected = reference(buffers[layer], weights[layer], residual=buffers[layer])
            assert relative_error(buffers[layer + 1], expected) < 4e-3
