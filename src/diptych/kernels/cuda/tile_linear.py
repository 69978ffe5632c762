"""A few rows times a weight on tensor cores: programs stream tiles of the weight, and what surrounds it is fused.

Owns the kernel behind `small_linear` for more than one row. M = rows, K = inputs. Units are those of row_linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import supports_dependent_launch, wait_for_inputs
from diptych.kernels.cuda.row_linear import activate, weight_rows


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How few rows are multiplied: weight rows and inputs of a tile, warps, stages of the pipeline, and how many
    inputs of its rows a program brings to the L2 cache before it waits for its own inputs."""

    rows: int
    block_k: int
    warps: int
    stages: int
    prefetch_k: int = 0


@triton.jit
def _prefetch_rows(weight, rows, exist, K: tl.constexpr, BLOCK: tl.constexpr):
    """Bring the first BLOCK inputs of the rows to the L2 cache, a line of 64 at a time."""
    k = tl.arange(0, BLOCK // 64) * 64
    exists = (exist[:, None] & (k < K)[None, :]).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [weight + (rows[:, None] * K + k[None, :]), exists],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _finish(
    total,
    out,
    out_stride,
    bias,
    residual,
    residual_stride,
    unit,
    num_outputs,
    num_rows,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GATE: tl.constexpr,
):
    """Bias, activation and residual of one unit's sums, float32 [ROWS, BLOCK_M], and the store."""
    rows, exist = weight_rows(unit, num_outputs, ROWS, GATE)
    if bias is not None:
        total += tl.load(bias + rows, mask=exist, other=0.0).to(tl.float32)[:, None]
    if GATE is None:
        column = unit * ROWS + tl.arange(0, ROWS)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, ROWS // 2, BLOCK_M]), [1, 2, 0]))
        total = activate(gate, up, GATE)
        column = unit * (ROWS // 2) + tl.arange(0, ROWS // 2)
    m = tl.arange(0, BLOCK_M)
    mask = (column < num_outputs)[:, None] & (m < num_rows)[None, :]
    if residual is not None:
        offsets = m[None, :] * residual_stride + column[:, None]
        total += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m[None, :] * out_stride + column[:, None], total.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x,
    x_stride,
    weight,
    out,
    out_stride,
    bias,
    residual,
    residual_stride,
    num_outputs,
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATE: tl.constexpr,
    PREFETCH_K: tl.constexpr,
):
    unit = tl.program_id(0)
    rows, exist = weight_rows(unit, num_outputs, ROWS, GATE)
    if PREFETCH_K > 0:
        _prefetch_rows(weight, rows, exist, K, PREFETCH_K)
    wait_for_inputs()
    m = tl.arange(0, BLOCK_M)
    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        mask = exist[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (k < K)[None, :]
        tile = tl.load(weight + rows[:, None] * K + k[None, :], mask=mask, other=0.0)
        mask = (k < K)[:, None] & (m < num_rows)[None, :]
        inputs = tl.load(x + m[None, :] * x_stride + k[:, None], mask=mask, other=0.0)
        total = tl.dot(tile, inputs, total)
    _finish(total, out, out_stride, bias, residual, residual_stride, unit, num_outputs, num_rows, ROWS, BLOCK_M, GATE)


def launch_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: str | None,
    config: TileConfig,
) -> None:
    """Multiply a few rows; arguments as small_linear's."""
    num_outputs = weight.shape[0] // (1 if gate is None else 2)
    dependent = supports_dependent_launch(x.device)
    _tile_kernel[(triton.cdiv(num_outputs, config.rows // (1 if gate is None else 2)),)](
        x,
        x.stride(0),
        weight,
        out,
        out.stride(0),
        bias,
        residual,
        0 if residual is None else residual.stride(0),
        num_outputs,
        x.shape[0],
        K=weight.shape[1],
        ROWS=config.rows,
        BLOCK_M=max(16, triton.next_power_of_2(x.shape[0])),
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        GATE=gate,
        PREFETCH_K=config.prefetch_k if dependent else 0,
        num_warps=config.warps,
        launch_pdl=dependent,
    )
