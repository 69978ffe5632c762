"""Batches to tensors, against a loop that says the same token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.batch import Admission, SequenceStep
from diptych.core.request import SamplingParams
from diptych.worker.inputs import build_inputs
from diptych.worker.slots import SlotTable

PAGE_SIZE = 4
rows = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=6)


def admit(slots: SlotTable, slot: int, token_ids: list[int], pages: list[int]) -> None:
    slots.admit(Admission(slot, f"r{slot}", token_ids, len(token_ids), SamplingParams(), (1,), 10))
    slots.append_pages(SequenceStep(slot, 0, 1, pages, False))


@settings(max_examples=100, deadline=None)
@given(rows, st.randoms())
def test_inputs_are_what_each_row_asks_for(rows, rng) -> None:
    slots = SlotTable(len(rows), 64, PAGE_SIZE)
    free_pages = list(range(200))
    rng.shuffle(free_pages)
    steps, token_ids, positions, kv_slots, logit_rows, pages_of = [], [], [], [], [], []
    for slot, (start, count, samples) in enumerate(rows):
        tokens = [rng.randrange(1000) for _ in range(start + count)]
        pages = [free_pages.pop() for _ in range(-(-(start + count) // PAGE_SIZE))]
        admit(slots, slot, tokens, pages)
        pages_of.append(pages)
        steps.append(SequenceStep(slot, start, count, [], samples))
        for position in range(start, start + count):
            token_ids.append(tokens[position])
            positions.append(position)
            kv_slots.append(pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        if samples:
            logit_rows.append(len(token_ids) - 1)
    inputs = build_inputs(steps, slots, torch.device("cpu"))
    assert inputs.token_ids.tolist() == token_ids
    assert inputs.positions.tolist() == positions
    assert inputs.logit_rows.tolist() == logit_rows
    attention = inputs.attention
    assert attention.kv_slots.tolist() == kv_slots
    assert attention.query_starts.tolist() == [0, *np.cumsum([count for _, count, _ in rows]).tolist()]
    assert attention.kv_lens_host == attention.kv_lens.tolist() == [start + count for start, count, _ in rows]
    assert attention.query_lens_host == [count for _, count, _ in rows]
    for row, pages in enumerate(pages_of):
        assert attention.page_table[row, : len(pages)].tolist() == pages
    assert inputs.token_ids.dtype == attention.kv_slots.dtype == torch.int64
    assert attention.page_table.dtype == attention.kv_lens.dtype == torch.int32


def test_a_slot_remembers_what_it_sampled() -> None:
    slots = SlotTable(2, 16, PAGE_SIZE)
    admit(slots, 1, [5, 6, 7], [3])
    slots.append_token(1, 99)
    inputs = build_inputs([SequenceStep(1, 3, 1, [], True)], slots, torch.device("cpu"))
    assert inputs.token_ids.tolist() == [99] and inputs.attention.kv_slots.tolist() == [3 * PAGE_SIZE + 3]


@pytest.mark.parametrize(
    ("sampled", "min_tokens", "has_ended"), [([9], 0, False), ([1], 0, True), ([1], 2, False), ([9, 1], 2, True)]
)
def test_a_slot_ends_with_eos_but_not_before_min_tokens(sampled, min_tokens, has_ended) -> None:
    slots = SlotTable(1, 16, PAGE_SIZE)
    sampling = SamplingParams(min_tokens=min_tokens, max_tokens=10)
    slots.admit(Admission(0, "r", [5, 6, 7], 3, sampling, (1,), 10))
    for token_id in sampled:
        slots.append_token(0, token_id)
    assert slots.occupant(0).has_ended is has_ended


def test_a_slot_ends_with_its_length_and_stop_tokens() -> None:
    slots = SlotTable(2, 16, PAGE_SIZE)
    slots.admit(Admission(0, "r", [5, 6, 7], 3, SamplingParams(), (), 2))
    slots.append_token(0, 9)
    assert not slots.occupant(0).has_ended
    slots.append_token(0, 9)
    assert slots.occupant(0).has_ended
    slots.admit(Admission(1, "s", [5], 1, SamplingParams(stop_token_ids=(4,)), (), 9))
    slots.append_token(1, 4)
    assert slots.occupant(1).has_ended
    slots.release(1)
    with pytest.raises(AssertionError, match="empty"):
        slots.occupant(1)


def test_a_resumed_sequence_counts_its_output() -> None:
    slots = SlotTable(1, 16, PAGE_SIZE)
    slots.admit(Admission(0, "r", [5, 6, 7, 8, 9], 3, SamplingParams(min_tokens=3), (1,), 10))
    slots.append_token(0, 1)
    assert slots.occupant(0).has_ended
