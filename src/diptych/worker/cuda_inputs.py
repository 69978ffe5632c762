"""From a batch's rows to the numbers of one step on a CUDA device, uploaded without waiting for it.

Owns the pinned memory that numbers travel through and the device's copy of the page tables. Worker's thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.core.batch import SequenceStep
from diptych.worker.cuda_graph import NUMBERS, PADDING
from diptych.worker.slots import SlotTable


class PinnedRing:
    """Pinned buffers used in turn; one is used again only when the device has read it.

    Args: depth: buffers, one more than steps that may be queued. numel: int64 elements of each at first.
    """

    def __init__(self, depth: int, numel: int) -> None:
        self._buffers = deque((torch.empty(numel, dtype=torch.int64, pin_memory=True), torch.cuda.Event())
                              for _ in range(depth))  # fmt: skip

    def take(self, numel: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A buffer of at least `numel`, and the event to record after the copies that read it were queued."""
        buffer, event = self._buffers.popleft()
        event.synchronize()
        if buffer.numel() < numel:
            buffer = torch.empty(2 * numel, dtype=torch.int64, pin_memory=True)
        self._buffers.append((buffer, event))
        return buffer[:numel], event


class DevicePages:
    """The slots' page tables on the device: int32 [slots, max pages], brought up to date step by step."""

    def __init__(self, slots: SlotTable, device: torch.device) -> None:
        self.table = torch.zeros(slots.pages.shape, dtype=torch.int32, device=device)
        self._slots = slots

    def append(self, steps: list[SequenceStep], ring: PinnedRing) -> None:
        """Take over the pages that the rows have just brought to the slot table."""
        places: list[int] = []
        pages: list[int] = []
        for step in steps:
            if step.new_pages:
                end = self._slots.occupant(step.slot).num_pages
                first = step.slot * self.table.shape[1] + end - len(step.new_pages)
                places += range(first, first + len(step.new_pages))
                pages += step.new_pages
        if not pages:
            return
        buffer, event = ring.take(2 * len(pages))
        buffer.numpy()[:] = places + pages
        uploaded = buffer.to(self.table.device, non_blocking=True)
        event.record()
        self.table.view(-1)[uploaded[: len(pages)]] = uploaded[len(pages) :].to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedNumbers:
    """A step with rows of any length, decode rows first, as device tensors; see `CudaStep`.

    kv_lens, rows: int32 [B] of the decode rows. pages: int32, of the prefill rows. query_lens_host, kv_lens_host: of
    the prefill rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    logit_rows: torch.Tensor
    store_slots: torch.Tensor
    kv_lens: torch.Tensor
    rows: torch.Tensor
    pages: torch.Tensor
    query_lens_host: NDArray[np.int32]
    kv_lens_host: NDArray[np.int32]


def decode_numbers(steps: list[SequenceStep], slots: SlotTable, out: NDArray[np.int64]) -> None:
    """Fill `out`, int64 [6, size], with one row a column in the order of `NUMBERS`; what is left over is padding."""
    count = len(steps)
    out[:, count:] = np.array(PADDING)[:, None]
    slot = np.fromiter((step.slot for step in steps), np.int64, count)
    start = np.fromiter((step.start for step in steps), np.int64, count)
    samples = np.fromiter((step.samples for step in steps), np.bool_, count)
    values = dict(zip(NUMBERS, out[:, :count], strict=True))
    values["token_ids"][:] = _token_ids(slot, start, slots)
    values["positions"][:] = start
    values["kv_slots"][:] = _kv_slots(slot, start, slots)
    values["kv_lens"][:] = start + 1
    values["rows"][:] = slot
    values["store_slots"][:] = np.where(samples, slot, -1)


def ragged_numbers(
    steps: list[SequenceStep], num_decodes: int, slots: SlotTable, *, ring: PinnedRing, device: torch.device
) -> RaggedNumbers:
    """The numbers of `steps`, whose first `num_decodes` are single tokens."""
    slot = np.array([step.slot for step in steps])
    start = np.array([step.start for step in steps])
    count = np.array([step.num_tokens for step in steps])
    samples = np.array([step.samples for step in steps])
    ends = np.cumsum(count)
    positions = np.arange(ends[-1]) + np.repeat(start - ends + count, count)
    slot_of_token = np.repeat(slot, count)
    kv_lens = start + count
    parts = (
        _token_ids(slot_of_token, positions, slots),
        positions,
        _kv_slots(slot_of_token, positions, slots),
        ends[samples] - 1,
        slot[samples],
        kv_lens[:num_decodes],
        slot[:num_decodes],
        _pages_of(slot[num_decodes:], kv_lens[num_decodes:], slots),
    )
    lens = [len(part) for part in parts]
    buffer, event = ring.take(sum(lens))
    np.concatenate(parts, out=buffer.numpy(), casting="unsafe")
    uploaded = buffer.to(device, non_blocking=True).split(lens)
    event.record()
    return RaggedNumbers(
        token_ids=uploaded[0],
        positions=uploaded[1],
        kv_slots=uploaded[2],
        logit_rows=uploaded[3],
        store_slots=uploaded[4],
        kv_lens=uploaded[5].to(torch.int32),
        rows=uploaded[6].to(torch.int32),
        pages=uploaded[7].to(torch.int32),
        query_lens_host=count[num_decodes:].astype(np.int32),
        kv_lens_host=kv_lens[num_decodes:].astype(np.int32),
    )


def _token_ids(slot: NDArray[np.int64], position: NDArray[np.int64], slots: SlotTable) -> NDArray[np.int64]:
    """Token ids known here; -1 - slot for one that the step before has sampled and only the device knows."""
    known = slots.num_tokens[slot] > position
    return np.where(known, slots.token_ids[slot, position], -1 - slot)


def _kv_slots(slot: NDArray[np.int64], position: NDArray[np.int64], slots: SlotTable) -> NDArray[np.int64]:
    page, offset = np.divmod(position, slots.page_size)
    return slots.pages[slot, page].astype(np.int64) * slots.page_size + offset


def _pages_of(slot: NDArray[np.int64], kv_lens: NDArray[np.int64], slots: SlotTable) -> NDArray[np.int32]:
    """Pages of the rows, one row after the other."""
    num_pages = -(-kv_lens // slots.page_size)
    if len(slot) == 0:
        return np.empty(0, dtype=np.int32)
    return np.concatenate([slots.pages[row, :pages] for row, pages in zip(slot, num_pages, strict=True)])
