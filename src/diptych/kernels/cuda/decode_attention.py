"""Attention of one query a sequence over the paged KV pool, balanced on the device.

Owns three things. A plan, made once a step from lengths that only the device knows: the keys of all (sequence, KV head)
pairs in one line, cut into equal shares, one a program. The attention kernel: each program attends over its share.
The merge: a pair that several programs share is put together by the one that comes last, always in the same order, so
the result does not depend on timing. Sizes of launches depend on shapes alone, so a CUDA graph can hold them.

B = sequences, H = query heads, G = KV heads, R = H / G, D = head_dim. Knows tensors, not layers or pools. A tile is
TILE adjacent tokens of one pair. Method: Flash-Decoding (Dao et al. 2023) with Stream-K's shares (Osama et al. 2023,
https://arxiv.org/abs/2301.03598).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import processors, supports_dependent_launch, wait_for_inputs

PLAN_HEADER = 4
"""int32 words before the shares of a plan: tiles of a share, then padding."""
SHARE_WORDS = 4
"""int32 words of a share: sequence, KV head and tile where it begins, and its number of tiles."""


PLAN_SIZES = (16, 128, 1024, 8192)
"""Most sequences of a plan, in a few steps: each is a kernel to compile."""
MAX_PER_PROCESSOR = 8
"""Most programs a multiprocessor that a configuration may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Programs a multiprocessor, tokens a tile, stages of the pipeline, warps of a program, and how many values of
    parts a merge holds at once."""

    per_processor: int
    tile: int
    stages: int
    warps: int
    merge_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkspace:
    """What a plan and its layers keep on the device; layers in one stream share it.

    plan: int32 [4 + 4 * programs]. partial_values: float32 [2 * programs, R, D], sums of a share's first and last pair
    where another program has a part of it. partial_scales: float32 [2 * programs, 2, R], their maxima and
    denominators. arrived: int32 [B, G], tiles of each pair that are in; zero between launches.
    """

    plan: torch.Tensor
    partial_values: torch.Tensor
    partial_scales: torch.Tensor
    arrived: torch.Tensor
    processors: int


@triton.jit
def _tiles_of(kv_len, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """First visible tile of a sequence and how many follow; an empty sequence has one, so that someone writes zeros."""
    first = kv_len * 0
    if WINDOW is not None:
        first = tl.maximum(kv_len - WINDOW, 0) // TILE
    return first, tl.maximum((kv_len + TILE - 1) // TILE - first, 1)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["kv_lens"])
def _plan_kernel(
    kv_lens,
    plan,
    num_rows,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    HEADER: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    kv_len = tl.load(kv_lens + row, mask=row < num_rows, other=0)
    _, tiles = _tiles_of(kv_len, WINDOW, TILE)
    tiles = tl.where(row < num_rows, tiles * NUM_KV_HEADS, 0)
    ends = tl.cumsum(tiles, axis=0)
    total = tl.sum(tiles, axis=0)
    share = (total + num_programs - 1) // num_programs
    program = tl.program_id(0) * BLOCK_PROGRAMS + tl.arange(0, BLOCK_PROGRAMS)
    start = program * share
    passed = (ends[None, :] <= start[:, None]) & (row < num_rows)[None, :]
    first_row = tl.sum(passed.to(tl.int32), axis=1)
    within = start - tl.sum(tl.where(passed, tiles[None, :], 0), axis=1)
    tiles_of_row = tl.sum(tl.where(row[None, :] == first_row[:, None], tiles[None, :], 0), axis=1)
    pair_tiles = tl.maximum(tiles_of_row // NUM_KV_HEADS, 1)
    entry = plan + HEADER + program * 4
    exists = program < num_programs
    tl.store(entry, first_row, mask=exists)
    tl.store(entry + 1, within // pair_tiles, mask=exists)
    tl.store(entry + 2, within % pair_tiles, mask=exists)
    tl.store(entry + 3, tl.minimum(share, total - start), mask=exists)
    if tl.program_id(0) == 0:
        tl.store(plan, share)


@triton.jit
def _pages(row_pages, token, kv_len, PAGE: tl.constexpr):
    """The pages that hold tokens; the first of the pool for tokens past the end."""
    return tl.load(row_pages + token // PAGE, mask=token < kv_len, other=0)


@triton.jit
def _token_offsets(cache, page, token, kv_head, PAGE: tl.constexpr):
    """Where tokens' rows begin within a layer's K or V."""
    return page.to(tl.int64) * cache[2] + (token % PAGE) * cache[3] + kv_head * cache[4]


@triton.jit
def _prefetch_tile(cache, kv_head, row_pages, kv_len, start, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Bring keys and values [TILE, D] to the L2 cache, a line of 64 at a time."""
    token = start + tl.arange(0, TILE)
    offsets = _token_offsets(cache, _pages(row_pages, token, kv_len, PAGE), token, kv_head, PAGE)
    lines = offsets[:, None] + (tl.arange(0, D // 64) * 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; mov.u32 $0, 0;",
        "=r,l,l",
        [cache[0] + lines, cache[1] + lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _attend(
    query,
    cache,
    kv_head,
    row_pages,
    kv_len,
    start,
    num_tiles,
    scale,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Online softmax of queries [BLOCK_R, D] over tiles; returns weighted values, maxima (base 2), denominators."""
    dim = tl.arange(0, D)
    highest = tl.full([query.shape[0]], -float("inf"), tl.float32)
    denominator = tl.zeros([query.shape[0]], tl.float32)
    weighted = tl.zeros([query.shape[0], D], tl.float32)
    token = start + tl.arange(0, TILE)
    page = _pages(row_pages, token, kv_len, PAGE)
    for _ in tl.range(0, num_tiles, num_stages=STAGES):
        visible = token < kv_len
        if WINDOW is not None:
            visible = visible & (token >= kv_len - WINDOW)
        offsets = _token_offsets(cache, page, token, kv_head, PAGE)
        key = tl.load(cache[0] + offsets[None, :] + dim[:, None], mask=visible[None, :], other=0.0)
        value = tl.load(cache[1] + offsets[:, None] + dim[None, :], mask=visible[:, None], other=0.0)
        scores = _scores(tl.dot(query, key), scale, SOFT_CAP)
        scores = tl.where(visible[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A tile may hide all its tokens; minus infinity minus itself would be NaN.
        safe = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        decay = tl.exp2(highest - safe)
        weights = tl.exp2(scores - safe[:, None])
        denominator = denominator * decay + tl.sum(weights, axis=1)
        weighted = tl.dot(weights.to(value.dtype), value, weighted * decay[:, None])
        highest = new_highest
        # Used only a tile later, so that its latency is hidden.
        token += TILE
        page = _pages(row_pages, token, kv_len, PAGE)
    return weighted, highest, denominator


@triton.jit
def _scores(products, scale, SOFT_CAP: tl.constexpr):
    """Scores in base 2; with a cap, `scale` has been divided by it, and tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    if SOFT_CAP is None:
        return products * (scale * 1.4426950408889634)
    else:
        capped = 1.0 - 2.0 / (tl.exp2(products * (scale * 2.8853900817779268)) + 1.0)
        return capped * (SOFT_CAP * 1.4426950408889634)


@triton.jit
def _store_output(out, head_stride, weighted, denominator, R: tl.constexpr, D: tl.constexpr):
    head = tl.arange(0, weighted.shape[0])
    result = weighted / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    offsets = head[:, None] * head_stride + tl.arange(0, D)[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=(head < R)[:, None])


@triton.jit
def _store_partial(workspace, slot, weighted, highest, denominator, R: tl.constexpr, D: tl.constexpr):
    head = tl.arange(0, weighted.shape[0])
    offsets = (slot * R + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(workspace[1] + offsets, weighted, mask=(head < R)[:, None])
    scales = workspace[2] + slot * 2 * R + head
    tl.store(scales, highest, mask=head < R)
    tl.store(scales + R, denominator, mask=head < R)


@triton.jit
def _merge(
    workspace, out, head_stride, pair_start, pair_tiles, share, R: tl.constexpr, D: tl.constexpr, MERGE_S: tl.constexpr
):
    """Put together a pair's parts, MERGE_S at a time, in the order of the programs, and write it."""
    first_program, last_program = pair_start // share, (pair_start + pair_tiles - 1) // share
    first_slot = 2 * first_program + (pair_start % share != 0).to(tl.int32)
    BLOCK_R: tl.constexpr = triton.next_power_of_2(R)
    head, dim = tl.arange(0, BLOCK_R), tl.arange(0, D)
    highest = tl.full([BLOCK_R], -float("inf"), tl.float32)
    denominator = tl.zeros([BLOCK_R], tl.float32)
    weighted = tl.zeros([BLOCK_R, D], tl.float32)
    for start in range(first_program, last_program + 1, MERGE_S):
        program = start + tl.arange(0, MERGE_S)
        # A program's first pair is in its even slot, so all but the first part are.
        slot = tl.where(program == first_program, first_slot, 2 * program)
        mask = (program <= last_program)[:, None] & (head < R)[None, :]
        scales = workspace[2] + slot[:, None] * 2 * R + head[None, :]
        part_highest = tl.load(scales, mask=mask, other=-float("inf"), cache_modifier=".cg")
        part_denominator = tl.load(scales + R, mask=mask, other=0.0, cache_modifier=".cg")
        offsets = (slot[:, None] * R + head[None, :])[:, :, None] * D + dim[None, None, :]
        part = tl.load(workspace[1] + offsets, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(part_highest, axis=0))
        safe = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        decay = tl.exp2(highest - safe)
        part_decay = tl.exp2(part_highest - safe[None, :])
        denominator = denominator * decay + tl.sum(part_denominator * part_decay, axis=0)
        weighted = weighted * decay[:, None] + tl.sum(part * part_decay[:, :, None], axis=0)
        highest = new_highest
    _store_output(out, head_stride, weighted, denominator, R, D)


@triton.jit
def _finish(
    workspace,
    out,
    result,
    cursor,
    tile,
    taken,
    pair_tiles,
    pair,
    share,
    R: tl.constexpr,
    D: tl.constexpr,
    MERGE_S: tl.constexpr,
):
    """Write a pair that is complete; otherwise keep its part, and whoever brings the last part merges them."""
    pair_out, head_stride = out
    weighted, highest, denominator = result
    if taken == pair_tiles:
        _store_output(pair_out, head_stride, weighted, denominator, R, D)
    else:
        # A program's first pair has its even slot, its last one the odd.
        slot = 2 * tl.program_id(0) + (cursor != tl.program_id(0) * share).to(tl.int32)
        _store_partial(workspace, slot, weighted, highest, denominator, R, D)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        before = tl.atomic_add(workspace[3] + pair, taken, sem="acq_rel")
        if before + taken == pair_tiles:
            tl.store(workspace[3] + pair, 0)
            _merge(workspace, pair_out, head_stride, cursor - tile, pair_tiles, share, R, D, MERGE_S)


@triton.jit
def _share(plan):
    """Tiles of a full share; this program's first sequence, KV head and tile, and its number of tiles."""
    entry = plan + 4 + tl.program_id(0) * 4
    return tl.load(plan), tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def _sequence(table, kv_lens, table_rows, row, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Length of a sequence, its first visible tile, the number of visible ones, and where its pages are listed."""
    page_table, stride = table
    kv_len = tl.load(kv_lens + row)
    first_tile, num_tiles = _tiles_of(kv_len, WINDOW, TILE)
    table_row = row
    if table_rows is not None:
        table_row = tl.load(table_rows + row)
    return kv_len, first_tile, num_tiles, page_table + table_row.to(tl.int64) * stride


@triton.jit
def _queries(query, row, kv_head, R: tl.constexpr, D: tl.constexpr):
    """The queries of one KV head, padded to what the tensor cores take: [max(16, R), D]."""
    head = tl.arange(0, max(16, triton.next_power_of_2(R)))
    offsets = row.to(tl.int64) * query[1] + (kv_head * R + head)[:, None] * query[2]
    return tl.load(query[0] + offsets + tl.arange(0, D)[None, :], mask=(head < R)[:, None], other=0.0)


@triton.jit(do_not_specialize_on_alignment=["kv_lens", "table_rows"])
def _decode_kernel(
    query,
    cache,
    table,
    kv_lens,
    table_rows,
    out,
    workspace,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MERGE_S: tl.constexpr,
    SETTLED: tl.constexpr,
):
    if not SETTLED:
        wait_for_inputs()
    share, row, kv_head, tile, remaining = _share(workspace[0])
    if SETTLED:
        if remaining > 0:
            kv_len, first_tile, _, pages = _sequence(table, kv_lens, table_rows, row, WINDOW, TILE)
            _prefetch_tile(cache, kv_head, pages, kv_len, (first_tile + tile) * TILE, D, PAGE, TILE)
        wait_for_inputs()
    cursor = tl.program_id(0) * share
    while remaining > 0:
        kv_len, first_tile, pair_tiles, pages = _sequence(table, kv_lens, table_rows, row, WINDOW, TILE)
        taken = tl.minimum(remaining, pair_tiles - tile)
        start = (first_tile + tile) * TILE
        queries = _queries(query, row, kv_head, R, D)
        result = _attend(
            queries, cache, kv_head, pages, kv_len, start, taken, scale, D, PAGE, TILE, STAGES, WINDOW, SOFT_CAP
        )
        pair_out = (out[0] + row.to(tl.int64) * out[1] + kv_head * R * out[2], out[2])
        pair = row * NUM_KV_HEADS + kv_head
        _finish(workspace, pair_out, result, cursor, tile, taken, pair_tiles, pair, share, R, D, MERGE_S)
        cursor, remaining, tile = cursor + taken, remaining - taken, 0
        row, kv_head = row + (kv_head + 1) // NUM_KV_HEADS, (kv_head + 1) % NUM_KV_HEADS


def decode_workspace(
    max_rows: int, *, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """A workspace for up to `max_rows` sequences. Layers of different windows need one each."""
    programs, ratio = MAX_PER_PROCESSOR * processors(device), num_heads // num_kv_heads
    return DecodeWorkspace(
        plan=torch.zeros(PLAN_HEADER + SHARE_WORDS * programs, dtype=torch.int32, device=device),
        partial_values=torch.zeros(2 * programs, ratio, head_dim, dtype=torch.float32, device=device),
        partial_scales=torch.zeros(2 * programs, 2, ratio, dtype=torch.float32, device=device),
        arrived=torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device),
        processors=processors(device),
    )


def _config(workspace: DecodeWorkspace, num_rows: int) -> DecodeConfig:
    """Measured on an H200: few pairs are cut into many shares, so merging counts; many hide each other's latency."""
    num_kv_heads, head_dim = workspace.arrived.shape[1], workspace.partial_values.shape[2]
    if head_dim > 128:
        return DecodeConfig(per_processor=3, tile=32, stages=3, warps=4, merge_elements=8192)
    if num_rows * num_kv_heads >= 1024:
        return DecodeConfig(per_processor=8, tile=32, stages=2, warps=1, merge_elements=2048)
    return DecodeConfig(per_processor=4, tile=32, stages=3, warps=2, merge_elements=8192)


def plan_decode(
    kv_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    window: int | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Cut the keys of sequences of `kv_lens` (int32 [B], on the device) into equal shares; once a step and window."""
    config = config or _config(workspace, kv_lens.shape[0])
    num_programs = config.per_processor * workspace.processors
    block_rows = next(size for size in PLAN_SIZES if size >= kv_lens.shape[0])
    block_programs = max(1, min(32, 8192 // block_rows))
    _plan_kernel[(triton.cdiv(num_programs, block_programs),)](
        kv_lens,
        workspace.plan,
        kv_lens.shape[0],
        num_programs,
        NUM_KV_HEADS=workspace.arrived.shape[1],
        WINDOW=window,
        TILE=config.tile,
        BLOCK_ROWS=block_rows,
        BLOCK_PROGRAMS=block_programs,
        HEADER=PLAN_HEADER,
        num_warps=4,
    )


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    table_rows: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    plan_is_settled: bool = False,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of each sequence's last token over its `kv_lens` tokens, or the last `window` of them.

    `plan_decode` must have run on these kv_lens with this window, workspace and config. Args: query and out: [B, H, D],
    D adjacent. key_cache, value_cache: [pages, page_size, G, D], any strides but that of D, both alike. page_table:
    int32 [B, pages], entries beyond a sequence's length undefined; with table_rows, int32 [B], a sequence's pages are
    in that row of it. kv_lens: int32 [B]; a sequence of 0 gets zeros. soft_cap: scores become cap * tanh(score / cap).
    plan_is_settled: the plan, kv_lens, page_table and table_rows were complete before the kernel in front of this one
    began, so they may be read while it still runs.
    """
    config = config or _config(workspace, kv_lens.shape[0])
    num_kv_heads, head_dim = key_cache.shape[2:]
    ratio = query.shape[1] // num_kv_heads
    _decode_kernel[(config.per_processor * workspace.processors,)](
        (query, *query.stride()[:2]),
        (key_cache, value_cache, *key_cache.stride()[:3]),
        (page_table, page_table.stride(0)),
        kv_lens,
        table_rows,
        (out, *out.stride()[:2]),
        (workspace.plan, workspace.partial_values, workspace.partial_scales, workspace.arrived),
        scale if soft_cap is None else scale / soft_cap,
        NUM_KV_HEADS=num_kv_heads,
        R=ratio,
        D=head_dim,
        PAGE=key_cache.shape[1],
        TILE=config.tile,
        STAGES=config.stages,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        MERGE_S=max(2, config.merge_elements // (triton.next_power_of_2(ratio) * head_dim)),
        SETTLED=plan_is_settled and supports_dependent_launch(query.device),
        num_warps=config.warps,
        launch_pdl=supports_dependent_launch(query.device),
    )
