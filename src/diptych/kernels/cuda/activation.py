"""The gated activation between a feed-forward network's two GEMMs. T = tokens, I = intermediate size."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import supports_dependent_launch, wait_for_inputs

_BLOCK = 1024


@triton.jit
def _gated_kernel(x_ptr, out_ptr, x_stride, out_stride, SIZE: tl.constexpr, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    slope = gate
    if IS_GELU:  # 0.5 (1 + tanh y) is sigmoid(2 y), and 2 sqrt(2 / pi) is 1.5957691
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-slope))).to(x_ptr.dtype.element_ty)
    result = (activated.to(tl.float32) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, result, mask=mask)


def gated(x: torch.Tensor, *, out: torch.Tensor, kind: Literal["silu", "gelu_tanh"]) -> None:
    """`out = activation(gate) * up`; the activation is rounded to x's dtype before it multiplies.

    Args: x: [T, 2 I], the gates first. out: [T, I].
    """
    num_tokens, size = out.shape
    _gated_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        x,
        out,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        IS_GELU=kind == "gelu_tanh",
        BLOCK=_BLOCK,
        num_warps=4,
        launch_pdl=supports_dependent_launch(x.device),
    )
