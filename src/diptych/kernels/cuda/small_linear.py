"""Linear layers over few rows: the weight is read once, at the memory's speed, and what surrounds the product is fused.

Owns the choice between the kernels of row_linear and tile_linear and their measured configurations. Both load or
prefetch weights before the kernel in front of them has finished (programmatic dependent launch), so the memory never
idles between layers; weights must therefore not be written by that kernel. Sums are taken in a fixed order: the same
shapes and inputs give the same bits.

M = rows, K = inputs, N = outputs (gate and up rows both counted). Knows tensors, not layers.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton

from diptych.kernels.cuda.norm import rms_norm
from diptych.kernels.cuda.row_linear import RowConfig, launch_row
from diptych.kernels.cuda.tile_linear import TileConfig, launch_tiles

MAX_SMALL_ROWS = 16
"""Most rows for which these kernels are no slower than cuBLAS and separate small kernels."""


def supports(weight: torch.Tensor) -> bool:
    """Whether `small_linear` can multiply with this weight, [N, K]."""
    num_outputs, num_inputs = weight.shape
    return weight.dtype == torch.bfloat16 and num_inputs % 64 == 0 and num_outputs % 8 == 0


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    gate: Literal["silu", "gelu_tanh"] | None = None,
    residual: torch.Tensor | None = None,
    config: RowConfig | TileConfig | None = None,
) -> None:
    """`out = residual + activate(norm(x) @ weight^T + bias)`, summed in float32 and rounded once.

    Args: x: bfloat16 [M, K], K a multiple of 64. weight: bfloat16 [N, K], contiguous, N a multiple of 8. out: bfloat16
    [M, N], or [M, N / 2] with `gate`. bias: [N]. norm_weight: [K], in bfloat16 or float32; x is then RMS-normalised
    first, rounded as layers/norm.py rounds; for more than one row by a kernel of its own. gate: weight rows are
    [gate; up] and the result is act(gate) * up. residual: as out, and may be out itself. config: instead of the
    measured one; a RowConfig takes one row.
    """
    num_rows, num_inputs = x.shape
    if config is None:
        config = _row_config(num_inputs) if num_rows == 1 else _tile_config(num_rows, weight.shape[0], num_inputs)
    if isinstance(config, RowConfig):
        assert num_rows == 1, f"a RowConfig takes one row, not {num_rows}"
        launch_row(
            x,
            weight,
            out=out,
            bias=bias,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            residual=residual,
            gate=gate,
            config=config,
        )
        return
    if norm_weight is not None:
        # Within the kernel every program would normalise all rows again: measured 40% slower on the largest weight.
        normed = torch.empty_like(x)
        rms_norm(x, norm_weight, eps=norm_eps, out=normed)
        x = normed
    launch_tiles(x, weight, out=out, bias=bias, residual=residual, gate=gate, config=config)


def _row_config(num_inputs: int) -> RowConfig:
    """Measured for 4096 and 14336 inputs on an H200; long rows are taken in chunks, by as many programs as units."""
    if num_inputs > 4096:
        return RowConfig(rows=8, block_k=2048, warps=8, prefetch=True)
    if num_inputs > 2048:
        return RowConfig(rows=4, block_k=4096, warps=8, per_processor=2, prefetch=True)
    block_k = triton.next_power_of_2(num_inputs)
    return RowConfig(rows=4, block_k=block_k, warps=max(1, block_k // 512))


def _tile_config(num_rows: int, num_weight_rows: int, num_inputs: int) -> TileConfig:
    """Measured for the shapes of Llama-3.1-8B on an H200."""
    if num_inputs > 8192 and num_rows > 8:
        return TileConfig(rows=16, block_k=256, warps=2, stages=4, prefetch_k=512)
    if num_inputs > 8192 or num_weight_rows > 8192:
        return TileConfig(rows=64, block_k=128, warps=4, stages=6, prefetch_k=512)
    return TileConfig(rows=64, block_k=128, warps=4, stages=5)
