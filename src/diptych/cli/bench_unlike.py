"""What it costs to send KV between engines of unlike tensor parallelism: piece by piece, or packed.

Direct: one descriptor for each token's shared heads. Staged: gather into a buffer, one descriptor, scatter at the
destination. Both are measured in turn; what would be chosen is computed from constants measured on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.transfer.packing import gather, scatter
from diptych.transfer.plan import Descriptors, page_template, plan, shards, writers
from diptych.transfer.staging import TransferCost

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 8, 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """How to measure. write: hand descriptors to an agent and wait; in_turn: least seconds of two things, measured
    alternately. src_base, dst_base: of the memories, of `nbytes` bytes each.
    """

    write: Callable[[Descriptors], None]
    in_turn: Callable[[Callable[[], None], Callable[[], None]], tuple[float, float]]
    src_base: int
    dst_base: int
    memory: np.ndarray


@dataclass(frozen=True, slots=True)
class Ways:
    """One rank of the source to one of the destination. Seconds; *_expected: by the constants; choice: the cheaper."""

    num_tokens: int
    nbytes: int
    num_descriptors: int
    piece_nbytes: int
    direct_s: float
    staged_s: float
    direct_expected_s: float
    staged_expected_s: float
    choice: str


def compare(timer: Timer, *, src_tp: int, dst_tp: int, lengths: tuple[int, ...] = (64, 256, 1024)) -> list[Ways]:
    """A row for each prompt length, and the constants measured first. Raises ConfigError for a tp that cannot be."""
    if min(src_tp, dst_tp) < 1:
        raise ConfigError(f"--src-tp {src_tp} and --dst-tp {dst_tp} must both be at least 1")
    full = KVLayout.single_rank(NUM_LAYERS, NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype="bfloat16")
    srcs, dsts = (shards(full, tp_size=size, pp_size=1) for size in (src_tp, dst_tp))
    src, dst = srcs[min(writers(dsts[0], 0, srcs))], dsts[0]
    cost = _cost(timer)
    rows = []
    for num_tokens in lengths:
        pages = np.arange(num_tokens // PAGE_SIZE, dtype=np.int64)
        if len(pages) * max(src.page_nbytes, dst.page_nbytes) * 2 > timer.memory.nbytes:
            continue
        # Pages of both in the first half of the memories, what is packed in the second.
        template = page_template(src, dst)
        found = plan(template, pages[::-1].copy(), dst_pages=pages, src_base=timer.src_base, dst_bases=[timer.dst_base])
        rows.append(_measure(timer, found, cost, num_tokens))
    return rows


def print_ways(rows: list[Ways], *, src_tp: int, dst_tp: int) -> None:
    """A table."""
    table = Table(title=f"one rank of tp {src_tp} to one of tp {dst_tp}, host memory; milliseconds (expected)")
    for column in ("tokens", "KiB", "descriptors", "bytes each", "direct", "staged", "chosen"):
        table.add_column(column, justify="right")
    for row in rows:
        ways = [
            f"{1e3 * measured:.2f} ({1e3 * expected:.2f})"
            for measured, expected in (
                (row.direct_s, row.direct_expected_s),
                (row.staged_s, row.staged_expected_s),
            )
        ]
        numbers = (row.num_tokens, row.nbytes // 1024, row.num_descriptors, row.piece_nbytes)
        table.add_row(*map(str, numbers), *ways, row.choice)
    Console().print(table)


def _measure(timer: Timer, found: Descriptors, cost: TransferCost, num_tokens: int) -> Ways:
    nbytes, piece = found.total_nbytes, int(found.nbytes[0])
    half = timer.memory.nbytes // 2
    packed = timer.memory[half : half + nbytes]
    pages = timer.memory[:half]
    whole = Descriptors(
        np.array([timer.src_base + half]), np.array([timer.dst_base + half]), np.array([nbytes], dtype=np.int64)
    )

    def staged() -> None:
        gather(pages, found.src - timer.src_base, nbytes=piece, packed=packed)
        timer.write(whole)
        scatter(packed, found.dst - timer.dst_base, nbytes=piece, memory=pages)  # as the destination would

    direct_s, staged_s = timer.in_turn(lambda: timer.write(found), staged)
    return Ways(
        num_tokens,
        nbytes,
        len(found),
        piece,
        direct_s,
        staged_s,
        cost.direct_s(len(found), nbytes),
        cost.staged_s(nbytes, nbytes),
        "staged" if cost.prefers_staging(found, nbytes) else "direct",
    )


def _cost(timer: Timer) -> TransferCost:
    """The constants of this pair, from two writes of as many bytes in unlike numbers of pieces, and one gather."""
    count, piece = 8192, 256  # as many and as small as those of a real prompt: the first ones come cheaper
    nbytes = count * piece
    places = np.arange(count, dtype=np.int64)[::-1].copy() * piece
    pieces = Descriptors(
        timer.src_base + places, timer.dst_base + places[::-1].copy(), np.full(count, piece, dtype=np.int64)
    )
    whole = Descriptors(np.array([timer.src_base]), np.array([timer.dst_base]), np.array([nbytes], dtype=np.int64))
    many_s, one_s = timer.in_turn(lambda: timer.write(pieces), lambda: timer.write(whole))
    half = timer.memory.nbytes // 2
    packed = timer.memory[half : half + nbytes]
    gather_s, _ = timer.in_turn(
        lambda: gather(timer.memory[:half], places, nbytes=piece, packed=packed),
        lambda: scatter(packed, places, nbytes=piece, memory=timer.memory[:half]),
    )
    return TransferCost(
        descriptor_s=max((many_s - one_s) / (count - 1), 1e-9),
        wire_bytes_per_s=nbytes / one_s,
        copy_bytes_per_s=nbytes / gather_s,
    )
