"""From logits to tokens on the device: argmax, and seeded draws from a truncated distribution without a sort.

A token depends on its row's logits and numbers only: sums are taken in an order that the batch cannot change. A row
whose maximum is not finite (a NaN counts as +inf) gives -1. R = rows, V = vocabulary, C = chunks of 64 tokens.

`sample_rows` is two kernels. The first reads the logits once and leaves each chunk's maximum and its sum of weights,
exp((logit - maximum) / temperature). The second, one program a row, bounds the smallest logit that can be kept by the
chunks' maxima, searches the cuts of top_k and top_p among the chunks that reach it (a four-way search over the logits'
bits, in registers unless there are many), and draws in the order of token ids: first the chunk, then the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import supports_dependent_launch, wait_for_inputs
from diptych.kernels.cuda.truncation import CHUNK, draw, find_cut, key_of, lower_bound, store_kept, value_of

_BLOCK = 4096  # tokens that a program of the first kernel looks at
_NUM_PROGRAMS = 1024  # of argmax: several for each of a GPU's 132 processors
_NUM_STATISTICS = 5  # arrays [R, C] in the workspace
_NUMBERS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "noise_ptr", "out_ptr"]
_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_TEMPERATURE = tl.constexpr(1e-6)  # as in sampling.truncation
_LOWEST = tl.constexpr(-(2**31))


def new_workspace(max_rows: int, vocab_size: int, *, device: torch.device) -> torch.Tensor:
    """Scratch memory for any call of at most so many rows: int64 [...]. Calls in one stream may share it."""
    num_words = triton.cdiv(max_rows * triton.cdiv(vocab_size, CHUNK.value), 4) * 4  # 16 bytes: each array is aligned
    return torch.empty(_NUM_STATISTICS * num_words // 2, dtype=torch.int64, device=device)


@triton.jit
def _load_sound(ptr, mask):
    x = tl.load(ptr, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _split_argmax_kernel(
    logits_ptr, best_ptr, row_stride, VOCAB_SIZE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    """The best token of each row's part of SPLIT tokens: its key in the upper half, the complement of its id below."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SPLIT + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_token = token
    for _ in range(0, SPLIT, BLOCK):
        x = _load_sound(logits_ptr + row * row_stride + token, token < VOCAB_SIZE)
        best_token = tl.where(x > best, token, best_token)
        best = tl.maximum(x, best)
        token += BLOCK
    packed = (key_of(best).to(tl.int64) << 32) | (0x7FFFFFFF - best_token).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(packed))


@triton.jit
def _finish_argmax_kernel(best_ptr, out_ptr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    packed = tl.max(tl.load(best_ptr + row * NUM_SPLITS + split, mask=split < NUM_SPLITS, other=-(2**63)))
    best = value_of((packed >> 32).to(tl.int32))
    token = 0x7FFFFFFF - (packed & 0x7FFFFFFF)
    tl.store(out_ptr + row, tl.where(tl.abs(best) < float("inf"), token, -1))


def argmax_rows(logits: torch.Tensor, *, out: torch.Tensor, workspace: torch.Tensor) -> None:
    """The likeliest token of every row, the lowest id among equals, -1 where the maximum is not finite.

    Args: logits: [R, V], any float dtype. out: int64 [R]. workspace: from `new_workspace`.
    """
    num_rows, vocab_size = logits.shape
    block = 1024 if num_rows <= 8 else _BLOCK
    num_blocks = triton.cdiv(vocab_size, block)
    split = triton.cdiv(num_blocks, min(num_blocks, max(1, _NUM_PROGRAMS // num_rows))) * block
    num_splits = triton.cdiv(vocab_size, split)
    _split_argmax_kernel[(num_rows, num_splits)](
        logits,
        workspace,
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        SPLIT=split,
        BLOCK=block,
        num_warps=max(4, block // 512),
        launch_pdl=supports_dependent_launch(logits.device),
    )
    _finish_argmax_kernel[(num_rows,)](
        workspace,
        out,
        NUM_SPLITS=num_splits,
        BLOCK=triton.next_power_of_2(num_splits),
        num_warps=1,
        launch_pdl=supports_dependent_launch(logits.device),
    )


@triton.jit(do_not_specialize_on_alignment=_NUMBERS[:1])
def _chunks_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each chunk's maximum, and the sum of its weights against that maximum."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = _load_sound(logits_ptr + row * row_stride + token, token < VOCAB_SIZE)
    scale = _LOG2_E / tl.maximum(tl.load(temperature_ptr + row).to(tl.float32), _MIN_TEMPERATURE)
    maxima = tl.max(x, axis=1)
    base = tl.where(tl.abs(maxima) < float("inf"), maxima, 0.0)
    sums = tl.sum(tl.exp2((x - base[:, None]) * scale), axis=1)
    tl.store(maxima_ptr + row * NUM_CHUNKS + chunk, maxima, mask=chunk < NUM_CHUNKS)
    tl.store(sums_ptr + row * NUM_CHUNKS + chunk, sums, mask=chunk < NUM_CHUNKS)


@triton.jit
def _floor(maxima, masses, best, scale, is_greedy, top_k, top_p, min_p):
    """A key that no kept token is below, from what is known of the chunks."""
    end = key_of(best) + 1
    floor = tl.full([], _LOWEST, tl.int32)
    if is_greedy:
        floor = end - 1
    else:
        if min_p > 0.0:
            distance = tl.log2(min_p) / scale
            floor = key_of(best + distance - 1e-5 * (tl.abs(best) - distance))
        if top_k > 0:
            floor = tl.maximum(floor, lower_bound(maxima, tl.where(maxima == maxima, 1.0, 0.0), top_k, end))
        elif min_p <= 0.0:
            heights = tl.exp2((maxima - best) * scale)
            floor = lower_bound(maxima, heights, top_p * tl.sum(masses), end)
    return floor


@triton.jit
def _list_chunks(maxima, floor, list_ptr, CHUNKS_BLOCK: tl.constexpr):
    """Store the numbers of the chunks that reach the floor, in order; which they are, and how many."""
    is_listed = (key_of(maxima) >= floor) & (maxima > -float("inf"))
    number = is_listed.to(tl.int32)
    tl.store(list_ptr + tl.cumsum(number, axis=0) - 1, tl.arange(0, CHUNKS_BLOCK), mask=is_listed)
    tl.debug_barrier()
    return is_listed, tl.sum(number)


@triton.jit
def _sample_row(
    row,
    maxima,
    sums,
    above_ptr,
    equal_ptr,
    list_ptr,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    noise,
    VOCAB_SIZE: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """The token of a row whose maximum, `best`, is finite."""
    scale = _LOG2_E / tl.maximum(temperature, _MIN_TEMPERATURE)
    is_greedy = temperature <= 0.0
    top_k = tl.where(top_k >= VOCAB_SIZE, 0, tl.maximum(top_k, 0))
    chunks = tl.arange(0, CHUNKS_BLOCK)
    above = sums * tl.exp2((maxima - best) * scale)
    equal = tl.zeros([CHUNKS_BLOCK], tl.int32)
    equal_weight = tl.full([], 0.0, tl.float32)
    low = tl.full([], _LOWEST, tl.int32)
    high = low
    num_equal = tl.full([], 0, tl.int32)
    if is_greedy | (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        low = _floor(maxima, above, best, scale, is_greedy, top_k, top_p, min_p)
        is_listed, count = _list_chunks(maxima, low, list_ptr, CHUNKS_BLOCK)
        if is_greedy:
            high = low + 1
            num_equal = tl.full([], 1, tl.int32)
        else:
            low, high, num_equal = find_cut(
                row, list_ptr, count, low, best, scale, top_k, top_p, min_p, tl.sum(above), VOCAB_SIZE
            )
        equal_weight = store_kept(row, list_ptr, count, above_ptr, equal_ptr, low, high, best, scale, min_p, VOCAB_SIZE)
        tl.debug_barrier()
        above = tl.load(above_ptr + chunks, mask=is_listed, other=0.0)
        equal = tl.load(equal_ptr + chunks, mask=is_listed, other=0)
    return draw(
        row, above, equal, equal_weight, low, high, num_equal, noise, best, scale, min_p, VOCAB_SIZE, CHUNKS_BLOCK
    )


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    noise_ptr,
    maxima_ptr,
    sums_ptr,
    above_ptr,
    equal_ptr,
    list_ptr,
    out_ptr,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    first = row * NUM_CHUNKS
    chunks = tl.arange(0, CHUNKS_BLOCK)
    maxima = tl.load(maxima_ptr + first + chunks, mask=chunks < NUM_CHUNKS, other=-float("inf"))
    best = tl.max(maxima)
    token = tl.full([], -1, tl.int32)
    if tl.abs(best) < float("inf"):
        token = _sample_row(
            logits_ptr + row * row_stride,
            maxima,
            tl.load(sums_ptr + first + chunks, mask=chunks < NUM_CHUNKS, other=0.0),
            above_ptr + first,
            equal_ptr + first,
            list_ptr + first,
            best,
            tl.load(temperature_ptr + row).to(tl.float32),
            tl.load(top_k_ptr + row).to(tl.int32),
            tl.load(top_p_ptr + row).to(tl.float32),
            tl.load(min_p_ptr + row).to(tl.float32),
            tl.load(noise_ptr + row),
            VOCAB_SIZE,
            CHUNKS_BLOCK,
        )
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_rows(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """One token a row: truncated by min_p, top_k and top_p, in this order, as `sampling.truncation` does.

    Tokens that equal the k-th are kept; of those that equal the last of top_p, the first by id. The draw is the inverse
    CDF of what is kept, in the order of token ids.

    Args: logits: [R, V], any float dtype. temperature, top_p, min_p: float [R]; temperature 0 is greedy, top_p 1 and
    min_p 0 cut nothing. top_k: int [R], 0 cuts nothing. noise: float [R] in [0, 1). out: int64 [R].
    workspace: from `new_workspace`.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK.value)
    words = workspace.view(torch.int32).view(_NUM_STATISTICS, -1)
    assert num_rows * num_chunks <= words.shape[1], "the workspace is for fewer rows"
    maxima, sums, above = words[:3].view(torch.float32)
    grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
    shape = {"VOCAB_SIZE": vocab_size, "NUM_CHUNKS": num_chunks, "launch_pdl": supports_dependent_launch(logits.device)}
    _chunks_kernel[grid](logits, temperature, maxima, sums, logits.stride(0), BLOCK=_BLOCK, num_warps=8, **shape)
    _draw_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        noise,
        maxima,
        sums,
        above,
        words[3],
        words[4],
        out,
        logits.stride(0),
        CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=16,
        **shape,
    )


@triton.jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["tokens_ptr", "slots_ptr"])
def _store_last_kernel(tokens_ptr, slots_ptr, last_tokens_ptr, num_rows, num_slots, BLOCK: tl.constexpr):
    wait_for_inputs()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row, mask=row < num_rows, other=-1)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    tl.store(last_tokens_ptr + slot, token, mask=(token >= 0) & (slot >= 0) & (slot < num_slots))


def store_last(tokens: torch.Tensor, slots: torch.Tensor, *, last_tokens: torch.Tensor) -> None:
    """`last_tokens[slots] = tokens`, without the rows whose token or slot is below 0.

    Args: tokens, slots: int64 [R]. last_tokens: int64 [num_slots].
    """
    num_rows = tokens.shape[0]
    _store_last_kernel[(triton.cdiv(num_rows, 256),)](
        tokens,
        slots,
        last_tokens,
        num_rows,
        last_tokens.shape[0],
        BLOCK=256,
        num_warps=4,
        launch_pdl=supports_dependent_launch(tokens.device),
    )
