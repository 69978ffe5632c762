"""Rotary tables, and one pass over the heads of a fused QKV projection: norm, rotation, and the copy into the KV pool.

Knows where keys and values go, not what a page means. T = tokens, H = query heads, G = KV heads, D = head size.
Dimension i of a head is paired with i + D / 2, as in `layers.rotary`; rotations are computed in float32 and rounded
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import supports_dependent_launch, wait_for_inputs

_ROWS = 32  # heads of several tokens that one program takes when there are many tokens
_MANY_TOKENS = 512


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _table_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    cos_stride,
    sin_stride,
    magnitude,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < HALF
    frequencies = tl.load(frequencies_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    angles = tl.load(positions_ptr + row).to(tl.float32) * frequencies
    tl.store(cos_ptr + row * cos_stride + columns, tl.cos(angles) * magnitude, mask=mask)
    tl.store(sin_ptr + row * sin_stride + columns, tl.sin(angles) * magnitude, mask=mask)


def rotary_table(
    positions: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    *,
    magnitude: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Cosines and sines of a step's positions, once for all layers that share the frequencies.

    The angle is a float32 product, as models were trained with; its cosine is exact at any size (no fast range
    reduction), so a position of a million is as good as it is in `layers.rotary`.

    Args: positions: int64 [T]. inverse_frequencies: float32 [D / 2]. cos, sin: float32 [T, D / 2], outputs.
    """
    half = inverse_frequencies.shape[0]
    _table_kernel[(positions.shape[0],)](
        positions,
        inverse_frequencies,
        cos,
        sin,
        cos.stride(0),
        sin.stride(0),
        magnitude,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
        launch_pdl=supports_dependent_launch(positions.device),
    )


@triton.jit
def _load_halves(ptr, mask, HALF: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, :]
    low = tl.load(ptr[:, None] + columns, mask=mask, other=0.0)
    return low, tl.load(ptr[:, None] + HALF + columns, mask=mask, other=0.0)


@triton.jit
def _store_halves(ptr, low, high, mask, HALF: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, :]
    tl.store(ptr[:, None] + columns, low, mask=mask)
    tl.store(ptr[:, None] + HALF + columns, high, mask=mask)


@triton.jit
def _normalized(low, high, weight_ptr, mask, eps, HALF: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    low *= inverse
    high *= inverse
    low_weight, high_weight = _load_halves(weight_ptr, mask, HALF, BLOCK)
    if low_weight.dtype != tl.float32:
        low = low.to(dtype).to(tl.float32)
        high = high.to(dtype).to(tl.float32)
    return (low * low_weight.to(tl.float32)).to(dtype), (high * high_weight.to(tl.float32)).to(dtype)


@triton.jit
def _rotate_into(
    target, source, weight_ptr, head, cos_ptr, sin_ptr, mask, eps, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalise, by row `head` of the weight, and rotate heads; pointers to heads, cosines and sines are [rows]."""
    low, high = _load_halves(source, mask, HALF, BLOCK)
    dtype: tl.constexpr = low.dtype
    if weight_ptr is not None:
        low, high = _normalized(low, high, weight_ptr + head * (2 * HALF), mask, eps, HALF, BLOCK)
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    columns = tl.arange(0, BLOCK)[None, :]
    cos = tl.load(cos_ptr[:, None] + columns, mask=mask, other=0.0)
    sin = tl.load(sin_ptr[:, None] + columns, mask=mask, other=0.0)
    low_rotated = (low * cos - high * sin).to(dtype)
    _store_halves(target, low_rotated, (high * cos + low * sin).to(dtype), mask, HALF, BLOCK)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["kv_slots_ptr"])
def _heads_kernel(
    projected_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    value_ptr,
    kv_slots_ptr,
    weight_ptr,
    num_tokens,
    eps,
    row_stride,
    table_stride,
    page_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: HEADS query, key or value heads (by its second index) of TOKENS tokens (by its first)."""
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    wait_for_inputs()
    block = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS * HEADS) // HEADS
    head = tl.arange(0, TOKENS * HEADS) % HEADS
    source = projected_ptr + token * row_stride
    cos_ptr += token * table_stride
    sin_ptr += token * table_stride
    if block < QUERY_BLOCKS:
        head += block * HEADS
        mask = ((token < num_tokens) & (head < NUM_HEADS))[:, None] & (tl.arange(0, BLOCK) < HALF)
        source += head * (2 * HALF)
        _rotate_into(source, source, weight_ptr, head, cos_ptr, sin_ptr, mask, eps, HALF, BLOCK)
    else:
        head += (block - QUERY_BLOCKS) % KV_BLOCKS * HEADS
        is_row = (token < num_tokens) & (head < NUM_KV_HEADS)
        slot = tl.load(kv_slots_ptr + token, mask=is_row, other=-1)
        mask = (is_row & (slot >= 0))[:, None] & (tl.arange(0, BLOCK) < HALF)
        target = slot // PAGE_SIZE * page_stride + (slot % PAGE_SIZE * NUM_KV_HEADS + head) * (2 * HALF)
        source += (NUM_HEADS + head) * (2 * HALF)
        if block < QUERY_BLOCKS + KV_BLOCKS:
            _rotate_into(
                key_ptr + target, source, weight_ptr, NUM_HEADS + head, cos_ptr, sin_ptr, mask, eps, HALF, BLOCK
            )
        else:
            low, high = _load_halves(source + NUM_KV_HEADS * (2 * HALF), mask, HALF, BLOCK)
            _store_halves(value_ptr + target, low, high, mask, HALF, BLOCK)


def prepare_heads(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_slots: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Normalise and rotate the query heads in place, the key heads into the cache, and copy the value heads there.

    Args: projected: [T, (H + 2 G) D], query, key and value heads side by side. cos, sin: float32 [T, D / 2] with equal
    strides. key_cache, value_cache: [num_pages, page_size, G, D], contiguous within a page, equal strides between
    pages. kv_slots: int64 [T], page times page_size plus offset; below 0: not written. norm_weight: [H + G, D].
    """
    assert key_cache.stride() == value_cache.stride(), "keys and values are two views of one pool"
    assert key_cache.stride()[1:] == (num_kv_heads * 2 * cos.shape[1], 2 * cos.shape[1], 1), "pages are contiguous"
    num_tokens = projected.shape[0]
    half = cos.shape[1]
    heads = min(8, triton.next_power_of_2(num_kv_heads))
    tokens = _ROWS // heads if num_tokens >= _MANY_TOKENS else 1
    block = triton.next_power_of_2(half)
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads))
    _heads_kernel[grid](
        projected,
        cos,
        sin,
        key_cache,
        value_cache,
        kv_slots,
        norm_weight,
        num_tokens,
        eps,
        projected.stride(0),
        cos.stride(0),
        key_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        PAGE_SIZE=key_cache.shape[1],
        TOKENS=tokens,
        HEADS=heads,
        BLOCK=block,
        num_warps=max(1, min(8, tokens * heads * block // 256)),
        launch_pdl=supports_dependent_launch(projected.device),
    )
