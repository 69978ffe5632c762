"""One row times a weight: programs hold whole rows of the weight in registers, and what surrounds the product is fused.

Owns the kernel behind `small_linear` for one row. A unit is ROWS rows of the weight whose sums one program takes
together; with a gate, the first half of them are gate rows and the second half their up rows. K = inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import processors, supports_dependent_launch, wait_for_inputs


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How one row is multiplied.

    A tile is `rows` x `block_k` of the weight, held by `warps` warps. per_processor: programs a multiprocessor, each of
    which takes many units; it must be as many as fit, or kernels that start early share out unevenly. 0: a program a
    unit. prefetch: load the next tile before multiplying this one.
    """

    rows: int
    block_k: int
    warps: int
    per_processor: int = 0
    prefetch: bool = False


@triton.jit
def weight_rows(unit, num_outputs, ROWS: tl.constexpr, GATE: tl.constexpr):
    """The weight rows of a unit, and which of them exist."""
    index = tl.arange(0, ROWS)
    if GATE is None:
        rows = unit * ROWS + index
        return rows.to(tl.int64), rows < num_outputs
    else:
        rows = unit * (ROWS // 2) + index % (ROWS // 2)
        return (rows + index // (ROWS // 2) * num_outputs).to(tl.int64), rows < num_outputs


@triton.jit
def activate(gate, up, GATE: tl.constexpr):
    """silu(gate) * up, or the same with the tanh form of gelu."""
    if GATE == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * inner)) * up


@triton.jit
def _normalize(x, inverse, norm_weight):
    """Rounds as layers/norm.py does: a float32 weight multiplies before the rounding, another one after it."""
    if norm_weight.dtype == tl.float32:
        return (x * inverse * norm_weight).to(tl.bfloat16)
    else:
        return ((x * inverse).to(tl.bfloat16).to(tl.float32) * norm_weight.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _inverse_rms(x, norm_eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, axis=0) / K + norm_eps)


@triton.jit
def _inputs(x, norm_weight, inverse, chunk, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """One chunk of the row, float32 [BLOCK_K], normalised if there is a norm."""
    k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
    value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    if norm_weight is not None:
        value = _normalize(value, inverse, tl.load(norm_weight + k, mask=k < K, other=0.0)).to(tl.float32)
    return value


@triton.jit
def _tile(
    weight,
    place,
    live,
    num_outputs,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
):
    """Weights [ROWS, BLOCK_K] at `place`: a program's chunks are numbered through all its units."""
    NUM_CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    unit = tl.program_id(0) + place // NUM_CHUNKS * tl.num_programs(0)
    rows, exist = weight_rows(unit, num_outputs, ROWS, GATE)
    k = place % NUM_CHUNKS * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (exist & live)[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (k < K)[None, :]
    return tl.load(weight + rows[:, None] * K + k[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _finish(total, out, bias, residual, unit, num_outputs, ROWS: tl.constexpr, GATE: tl.constexpr):
    """Bias, activation and residual of one unit's sums, float32 [ROWS], and the store."""
    if bias is not None:
        rows, exist = weight_rows(unit, num_outputs, ROWS, GATE)
        total += tl.load(bias + rows, mask=exist, other=0.0).to(tl.float32)
    if GATE is None:
        column = unit * ROWS + tl.arange(0, ROWS)
    else:
        column = unit * (ROWS // 2) + tl.arange(0, ROWS // 2)
        gate, up = tl.split(tl.trans(tl.reshape(total, [2, ROWS // 2])))
        total = activate(gate, up, GATE)
    mask = column < num_outputs
    if residual is not None:
        total += tl.load(residual + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(tl.bfloat16), mask=mask)


@triton.jit
def _row_kernel(
    x,
    weight,
    out,
    bias,
    norm_weight,
    residual,
    norm_eps,
    num_outputs,
    num_units,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    NUM_CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_places = (num_units - program + num_programs - 1) // num_programs * NUM_CHUNKS
    tile = _tile(weight, 0, True, num_outputs, K, ROWS, BLOCK_K, GATE)
    wait_for_inputs()
    inverse = 1.0
    if norm_weight is not None:
        inverse = _inverse_rms(x, norm_eps, K, BLOCK_K)
    inputs = _inputs(x, norm_weight, inverse, 0, K, BLOCK_K)
    # Eight neighbours are summed within a thread; the sums of a row wait for its last chunk to meet across threads.
    sums = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    for place in range(num_places):
        more = place + 1 < num_places
        if PREFETCH:
            next_tile = _tile(weight, place + 1, more, num_outputs, K, ROWS, BLOCK_K, GATE)
        if NUM_CHUNKS > 1:
            inputs = _inputs(x, norm_weight, inverse, place % NUM_CHUNKS, K, BLOCK_K)
        sums += tl.sum(tl.reshape(tile.to(tl.float32) * inputs[None, :], [ROWS, BLOCK_K // 8, 8]), axis=2)
        if not PREFETCH:
            next_tile = _tile(weight, place + 1, more, num_outputs, K, ROWS, BLOCK_K, GATE)
        if place % NUM_CHUNKS == NUM_CHUNKS - 1:
            unit = program + place // NUM_CHUNKS * num_programs
            _finish(tl.sum(sums, axis=1), out, bias, residual, unit, num_outputs, ROWS, GATE)
            sums = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
        tile = next_tile


def launch_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    residual: torch.Tensor | None,
    gate: str | None,
    config: RowConfig,
) -> None:
    """Multiply one row; arguments as small_linear's."""
    num_outputs = weight.shape[0] // (1 if gate is None else 2)
    num_units = triton.cdiv(num_outputs, config.rows // (1 if gate is None else 2))
    _row_kernel[(min(num_units, config.per_processor * processors(x.device)) or num_units,)](
        x,
        weight,
        out,
        bias,
        norm_weight,
        residual,
        norm_eps,
        num_outputs,
        num_units,
        K=weight.shape[1],
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        GATE=gate,
        PREFETCH=config.prefetch,
        num_warps=config.warps,
        launch_pdl=supports_dependent_launch(x.device),
    )
