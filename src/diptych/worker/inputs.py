"""From a batch's rows to the device tensors of one step, in numpy, without a Python loop over tokens."""

from __future__ import annotations

import numpy as np
import torch

from diptych.attention.backend import AttentionInputs, ForwardInputs
from diptych.core.batch import SequenceStep
from diptych.worker.slots import SlotTable


def build_inputs(steps: list[SequenceStep], slots: SlotTable, device: torch.device) -> ForwardInputs:
    """Ragged inputs of the given rows (at least one). `logit_rows` are the last tokens of the rows that sample,
    and before each of them those that precede its guesses.
    """
    slot_of_row = np.array([step.slot for step in steps])
    starts = np.array([step.start for step in steps])
    counts = np.array([step.num_tokens for step in steps])
    ends = starts + counts
    query_starts = np.zeros(len(steps) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])

    slot_of_token = np.repeat(slot_of_row, counts)
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    page_index, offset = np.divmod(positions, slots.page_size)
    kv_slots = slots.pages[slot_of_token, page_index].astype(np.int64) * slots.page_size + offset
    max_pages = -(-int(ends.max()) // slots.page_size)
    num_logits = np.array([1 + step.max_drafts if step.samples else 0 for step in steps])

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ForwardInputs(
        token_ids=to_device(slots.token_ids[slot_of_token, positions].astype(np.int64)),
        positions=to_device(positions),
        logit_rows=to_device(_last_of_each(query_starts[1:].astype(np.int64), num_logits)),
        attention=AttentionInputs(
            query_starts=to_device(query_starts),
            kv_lens=to_device(ends.astype(np.int32)),
            page_table=to_device(slots.pages[slot_of_row, :max_pages]),
            kv_slots=to_device(kv_slots),
            query_lens_host=counts.tolist(),
            kv_lens_host=ends.tolist(),
        ),
    )


def _last_of_each(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last `counts` places before each of `ends`, one row after the other: int64 [sum of counts]."""
    return np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
