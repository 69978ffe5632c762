"""Prefill and decode apart against one engine that does both: what a client sees of either, request by request.

Owns the order of requests and the arithmetic of the comparison. Starts nothing: it is given addresses. Each prompt is
sent to all in turn, one request open at a time, so that a busy machine slows all alike.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import orjson

from diptych.bench.measure import Distribution, RequestRecord
from diptych.bench.serve import ServeOptions, measure_request, open_session
from diptych.bench.workload import BenchRequest, Vocabulary
from diptych.errors import Unavailable

# The pages of a request may still be on their way back to the pool when its last token has arrived.
PAUSE_S = 0.05
NUM_WARMUP = 3
GOAL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Door:
    """A way to the model: how it is called, where, and what every body gets besides."""

    name: str
    options: ServeOptions


class Moved(NamedTuple):
    """What a prefill engine has sent since its start; the difference of two is what was sent between them."""

    nbytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt length. records: by door, in the order of the prompts. moved: by all transfers of the row together."""

    input_len: int
    records: Mapping[str, Sequence[RequestRecord]]
    moved: Moved
    num_moved: int

    def ttft_ms(self, door: str) -> Distribution | None:
        """Time to first token."""
        return _milliseconds([record.ttft_s for record in self.records[door]])

    def second_ms(self, door: str) -> Distribution | None:
        """From the first token to the second: where the KV lands."""
        return _milliseconds([record.itl_s[0] for record in self.records[door] if record.itl_s])

    def itl_ms(self, door: str) -> Distribution | None:
        """Between later tokens."""
        return _milliseconds([gap for record in self.records[door] for gap in record.itl_s[1:]])

    def added_ms(self, door: str, base: str) -> float:
        """Median over the prompts of what `door` takes longer to its first token than `base`."""
        gaps = [
            theirs.ttft_s - ours.ttft_s
            for theirs, ours in zip(self.records[door], self.records[base], strict=True)
            if theirs.ttft_s is not None and ours.ttft_s is not None
        ]
        return 1e3 * float(np.median(gaps)) if gaps else float("nan")

    @property
    def moved_nbytes(self) -> float:
        """Of one request."""
        return self.moved.nbytes / self.num_moved

    @property
    def allowed_ms(self) -> float:
        """What prefill and decode apart may add: the goal, and the time that the bytes of a request take."""
        return 1e3 * (GOAL_S + self.moved.seconds / self.num_moved)

    @property
    def failures(self) -> list[str]:
        """Why requests failed."""
        return [record.error for records in self.records.values() for record in records if record.error is not None]


def _milliseconds(seconds: Sequence[float | None]) -> Distribution | None:
    return Distribution.of(1e3 * value for value in seconds if value is not None)


async def measure(
    doors: Sequence[Door],
    input_lens: Sequence[int],
    *,
    prefill_url: str,
    vocabulary: Vocabulary,
    num_prompts: int,
    output_len: int,
    seed: int,
) -> list[Row]:
    """Every length in turn. Prompts are random, so that no prefix cache knows them; each door gets its own.

    Args: prefill_url: of the engine whose transfers are counted. Raises: Unavailable if it does not tell them.
    """
    source = random.Random(seed)
    async with AsyncExitStack() as stack:
        sessions = {door.name: await stack.enter_async_context(open_session(door.options)) for door in doors}
        prefill = await stack.enter_async_context(open_session(ServeOptions(url=prefill_url)))

        async def send(door: Door, input_len: int) -> RequestRecord:
            request = BenchRequest(vocabulary.draw(source, input_len), output_len)
            record = await measure_request(
                sessions[door.name], request, options=door.options, began=time.perf_counter()
            )
            await asyncio.sleep(PAUSE_S)
            return record

        rows = []
        for input_len in input_lens:
            for _ in range(NUM_WARMUP):
                for door in doors:
                    await send(door, input_len)
            before = await _moved(prefill)
            records: dict[str, list[RequestRecord]] = {door.name: [] for door in doors}
            for turn in range(num_prompts):
                for door in _rotated(doors, turn):
                    records[door.name].append(await send(door, input_len))
            after = await _moved(prefill)
            moved = Moved(after.nbytes - before.nbytes, after.seconds - before.seconds)
            num_moved = num_prompts * (len(doors) - 1)
            rows.append(Row(input_len=input_len, records=records, moved=moved, num_moved=num_moved))
        return rows


def _rotated(doors: Sequence[Door], turn: int) -> list[Door]:
    """Each door comes first equally often."""
    first = turn % len(doors)
    return [*doors[first:], *doors[:first]]


async def _moved(session: aiohttp.ClientSession) -> Moved:
    async with session.get("v1/loads?include=disagg") as response:
        entry: dict[str, Any] = orjson.loads(await response.read())["loads"][0].get("disaggregation", {})
    if "bytes_sent" not in entry:
        raise Unavailable("the prefill engine does not say what it has sent")
    return Moved(entry["bytes_sent"], entry["transfer_seconds"])
