"""RMS normalisation with the residual sum around it, one program a token.

Owns the arithmetic on a CUDA device; `layers.norm` says which order of roundings a model wants: a float32 weight
multiplies before the result is rounded, a weight in the model's dtype after. T = tokens, n = hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import supports_dependent_launch, wait_for_inputs


@triton.jit
def _normalized(x, weight, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    inverse = tl.rsqrt(tl.sum(x * x) / SIZE + eps)
    if weight.dtype == tl.float32:
        return (x * inverse * weight).to(dtype)
    return ((x * inverse).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _norm_kernel(
    hidden_ptr,
    delta_ptr,
    delta_weight_ptr,
    weight_ptr,
    out_ptr,
    hidden_stride,
    delta_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = norm(hidden += [norm] delta), where what is None is left out."""
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if delta_weight_ptr is not None:
        delta_weight = tl.load(delta_weight_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(hidden_ptr + row * hidden_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if delta_weight_ptr is not None:
            delta = _normalized(delta, delta_weight, eps, SIZE, dtype).to(tl.float32)
        total = (x + delta).to(dtype)
        tl.store(hidden_ptr + row * hidden_stride + columns, total, mask=mask)
        x = total.to(tl.float32)
    if weight_ptr is not None:
        tl.store(out_ptr + row * out_stride + columns, _normalized(x, weight, eps, SIZE, dtype), mask=mask)


def _launch(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    *,
    delta_weight: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
) -> None:
    num_tokens, size = hidden.shape
    block = triton.next_power_of_2(size)
    _norm_kernel[(num_tokens,)](
        hidden,
        delta,
        delta_weight,
        weight,
        out,
        hidden.stride(0),
        0 if delta is None else delta.stride(0),
        0 if out is None else out.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),  # 16 bytes a thread in bfloat16
        launch_pdl=supports_dependent_launch(hidden.device),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor) -> None:
    """`out = norm(x)`: [T, n] each, weight [n]; `out` may be x."""
    _launch(x, None, delta_weight=None, weight=weight, eps=eps, out=out)


def add_rms_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    out: torch.Tensor,
    delta_weight: torch.Tensor | None = None,
) -> None:
    """`hidden += delta` in place, then `out = norm(hidden)`; the sum is rounded before it is normalised.

    Args: hidden, delta, out: [T, n]; `out` may be delta. weight: [n]. delta_weight: [n] if delta is to be normalised
    before it is added (Gemma's norm after a block), with the same eps.
    """
    _launch(hidden, delta, delta_weight=delta_weight, weight=weight, eps=eps, out=out)


def add_norm(hidden: torch.Tensor, delta: torch.Tensor, delta_weight: torch.Tensor, *, eps: float) -> None:
    """`hidden += norm(delta)` in place: [T, n] both, weight [n]."""
    _launch(hidden, delta, delta_weight=delta_weight, weight=None, eps=eps, out=None)
