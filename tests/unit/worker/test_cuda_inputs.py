"""The numbers of a decode step on a CUDA device, and which batch sizes are captured; neither needs the device."""

from __future__ import annotations

import numpy as np
import torch

from diptych.core.batch import Admission, SequenceStep
from diptych.core.request import SamplingParams
from diptych.worker.cuda_graph import NUMBERS, DecodeGraphs, ladder
from diptych.worker.cuda_inputs import decode_numbers
from diptych.worker.slots import SlotTable


def slots_with(*lens: int) -> SlotTable:
    slots = SlotTable(len(lens), 64, 4)
    for slot, length in enumerate(lens):
        prompt = [100 * slot + position for position in range(length)]
        slots.admit(Admission(slot, f"r{slot}", prompt, length, SamplingParams(max_tokens=9), (), 9))
        slots.append_pages(SequenceStep(slot, 0, length, [10 * slot + page for page in range(8)], True))
    return slots


def numbers_of(steps: list[SequenceStep], slots: SlotTable, size: int) -> dict[str, list[int]]:
    out = np.full((len(NUMBERS), size), 77, dtype=np.int64)
    decode_numbers(steps, slots, out)
    return {name: row.tolist() for name, row in zip(NUMBERS, out, strict=True)}


def test_a_token_that_only_the_device_knows_is_named_by_its_slot() -> None:
    slots = slots_with(5, 9)
    slots.append_token(1, 42)
    found = numbers_of([SequenceStep(1, 9, 1, [], True), SequenceStep(0, 5, 1, [], True)], slots, 4)
    assert found == {
        "token_ids": [42, -1, 0, 0],
        "positions": [9, 5, 0, 0],
        "kv_slots": [12 * 4 + 1, 1 * 4 + 1, -1, -1],
        "kv_lens": [10, 6, 0, 0],
        "rows": [1, 0, 0, 0],
        "store_slots": [1, 0, -1, -1],
    }


def test_a_row_that_samples_nothing_stores_nothing() -> None:
    found = numbers_of([SequenceStep(0, 2, 1, [], False)], slots_with(5), 1)
    assert found["token_ids"] == [2] and found["store_slots"] == [-1]


def test_the_ladder_ends_at_what_is_asked_for_and_wastes_little() -> None:
    for most in (1, 3, 8, 100, 256, 512, 1000):
        sizes = ladder(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes))
        for rows in range(1, most + 1):
            held = next(size for size in sizes if size >= rows)
            assert held - rows <= max(7, rows // 4)


def test_what_is_not_captured_is_not_used() -> None:
    graphs = DecodeGraphs(16, lambda numbers: None, device=torch.device("cpu"))  # type: ignore[arg-type,return-value]
    assert graphs.size_for(3) is None
