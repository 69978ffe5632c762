"""The handoff rows: exact bytes, and nothing lost between pack and unpack."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.batch import TokenLogprobs
from diptych.errors import InvariantError
from diptych.transfer.handoff import (
    NUM_BUFFERS,
    Handoff,
    HandoffLayout,
    HandoffRows,
    HandoffSlots,
    handoff_descriptors,
)

LAYOUT = HandoffLayout(num_slots=3, num_top_logprobs=20, hidden_nbytes=100)
LOGPROBS = TokenLogprobs(token_id=7, logprob=-0.5, rank=2, top=[(9, -0.25), (7, -0.5), (1, -3.0)])
HIDDEN = bytes(range(100))


def rows_of(layout: HandoffLayout) -> tuple[bytearray, HandoffRows]:
    memory = bytearray(b"\xee" * layout.nbytes)
    return memory, HandoffRows(layout, memory)


def row(memory: bytearray, buffer: int, slot: int, layout: HandoffLayout = LAYOUT) -> bytes:
    start = layout.offsets[buffer] + slot * layout.row_nbytes[buffer]
    return bytes(memory[start : start + layout.row_nbytes[buffer]])


def test_layout() -> None:
    assert LAYOUT.row_nbytes == (64, 64, 64, 80, 80, 100)
    assert LAYOUT.offsets == (0, 192, 384, 576, 832, 1088, 1408)  # 240 and 300 are rounded up to 64
    assert LAYOUT.addresses(10_000) == (10_000, 10_192, 10_384, 10_576, 10_832, 11_088)
    assert LAYOUT.nbytes == 1408


def test_short_rows_are_padded_to_64_bytes() -> None:
    layout = HandoffLayout(num_slots=2, num_top_logprobs=1, hidden_nbytes=0)
    assert layout.row_nbytes == (64,) * 6
    assert layout.nbytes == 2 * 64 * 6


def test_exact_bytes_of_a_row() -> None:
    memory, rows = rows_of(LAYOUT)
    rows.pack(1, Handoff(token_id=7, num_cached_tokens=48, logprobs=LOGPROBS, hidden=HIDDEN))
    assert row(memory, 0, 1) == struct.pack("<16i", 7, 48, 2, 3, 3, *[0] * 10, 1)
    assert row(memory, 1, 1) == struct.pack("<16f", -0.5, *[0] * 15)
    assert row(memory, 2, 1) == struct.pack("<16i", 7, *[0] * 15)
    assert row(memory, 3, 1) == struct.pack("<20f", -0.25, -0.5, -3.0, *[0] * 17)
    assert row(memory, 4, 1) == struct.pack("<20i", 9, 7, 1, *[0] * 17)
    assert row(memory, 5, 1) == HIDDEN
    for buffer in range(NUM_BUFFERS):  # the other slots were not touched
        for slot in (0, 2):
            assert set(row(memory, buffer, slot)) == {0xEE}


def test_a_base_row_has_nothing_but_the_base_columns() -> None:
    memory, rows = rows_of(LAYOUT)
    rows.pack(0, Handoff(token_id=7, num_cached_tokens=48, logprobs=LOGPROBS).as_base())
    assert row(memory, 0, 0) == struct.pack("<16i", 7, *[0] * 15)
    assert row(memory, 3, 0)[:12] == struct.pack("<3f", -0.25, -0.5, -3.0)
    assert row(memory, 5, 0) == bytes(100)


def test_a_base_row_is_read_as_the_request_asked() -> None:
    _, rows = rows_of(LAYOUT)
    rows.pack(0, Handoff(token_id=7, num_cached_tokens=48, logprobs=LOGPROBS).as_base())
    assert rows.unpack(0).logprobs is None
    found = rows.unpack(0, num_top_logprobs=2)
    assert found.logprobs == TokenLogprobs(token_id=7, logprob=-0.5, rank=0, top=[(9, -0.25), (7, -0.5)])
    assert (found.token_id, found.num_cached_tokens, found.is_extended) == (7, 0, False)


def test_packing_leaves_nothing_of_the_last_request() -> None:
    memory, rows = rows_of(LAYOUT)
    rows.pack(0, Handoff(token_id=7, num_cached_tokens=48, logprobs=LOGPROBS, hidden=HIDDEN))
    rows.pack(0, Handoff(token_id=5))
    assert row(memory, 0, 0) == struct.pack("<16i", 5, *[0] * 14, 1)
    for buffer in range(1, NUM_BUFFERS):
        assert not any(row(memory, buffer, 0))
    assert rows.unpack(0) == Handoff(token_id=5)


FLOATS = st.floats(-1e4, 0, width=32)
TOKENS = st.integers(0, 2**31 - 1)


@settings(max_examples=60, deadline=None)
@given(
    TOKENS,
    st.integers(0, 2**31 - 1),
    st.none() | st.tuples(FLOATS, st.integers(1, 2**31 - 1), st.lists(st.tuples(TOKENS, FLOATS), max_size=20)),
    st.sampled_from([b"", HIDDEN]),
)
def test_round_trip(token_id: int, cached: int, logprobs: tuple | None, hidden: bytes) -> None:
    _, rows = rows_of(LAYOUT)
    made = TokenLogprobs(token_id, *logprobs) if logprobs else None
    handoff = Handoff(token_id=token_id, num_cached_tokens=cached, logprobs=made, hidden=hidden)
    rows.pack(2, handoff)
    assert rows.unpack(2) == handoff


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=LAYOUT.nbytes, max_size=LAYOUT.nbytes))
def test_any_bytes_can_be_unpacked(content: bytes) -> None:
    rows = HandoffRows(LAYOUT, bytearray(content))
    for slot in range(LAYOUT.num_slots):
        found = rows.unpack(slot, num_top_logprobs=500)
        assert found.num_cached_tokens >= 0
        assert found.logprobs is None or len(found.logprobs.top) <= LAYOUT.num_top_logprobs


def test_more_top_logprobs_than_fit_are_cut() -> None:
    layout = HandoffLayout(num_slots=1, num_top_logprobs=2, hidden_nbytes=0)
    memory, rows = rows_of(layout)
    rows.pack(0, Handoff(token_id=7, logprobs=LOGPROBS))
    assert rows.unpack(0).logprobs.top == [(9, -0.25), (7, -0.5)]
    assert row(memory, 3, 0, layout)[8:] == bytes(56)


def test_memory_and_hidden_state_must_fit() -> None:
    with pytest.raises(InvariantError, match="1408 writable bytes, got 1407"):
        HandoffRows(LAYOUT, bytearray(1407))
    with pytest.raises(InvariantError, match="writable"):
        HandoffRows(LAYOUT, memoryview(bytes(1408)))
    _, rows = rows_of(LAYOUT)
    with pytest.raises(InvariantError, match="hidden state of 3 bytes, rows hold 100"):
        rows.pack(0, Handoff(token_id=1, hidden=b"abc"))


def test_slots() -> None:
    slots = HandoffSlots(3)
    assert [slots.allocate() for _ in range(4)] == [0, 1, 2, None]
    slots.free(1)
    assert (slots.num_free, slots.allocate(), slots.num_free) == (1, 1, 0)
    slots.free(0)
    for slot in (0, 3, -1):
        with pytest.raises(InvariantError, match=f"slot {slot} of 3 was freed but is not taken"):
            slots.free(slot)


def test_descriptors_carry_the_rows() -> None:
    small = HandoffLayout(num_slots=5, num_top_logprobs=30, hidden_nbytes=100)
    source, target = bytearray(LAYOUT.nbytes), np.zeros(small.nbytes, np.uint8)
    rows = HandoffRows(LAYOUT, source)
    handoff = Handoff(token_id=7, num_cached_tokens=4, logprobs=LOGPROBS, hidden=HIDDEN)
    rows.pack(2, handoff)
    found = handoff_descriptors(
        LAYOUT, 0, src_slot=2, dst_addresses=small.addresses(0), dst_row_nbytes=small.row_nbytes, dst_slot=4
    )
    assert found.nbytes.tolist() == [64, 64, 64, 80, 80, 100]
    for src, dst, nbytes in zip(found.src, found.dst, found.nbytes, strict=True):
        target[dst : dst + nbytes] = np.frombuffer(source, np.uint8)[src : src + nbytes]
    assert HandoffRows(small, target).unpack(4) == handoff


def test_descriptors_need_six_addresses_and_a_slot() -> None:
    good = {"src_slot": 0, "dst_addresses": (0,) * 6, "dst_row_nbytes": LAYOUT.row_nbytes, "dst_slot": 0}
    with pytest.raises(InvariantError, match="6 aux addresses needed, the destination has 5"):
        handoff_descriptors(LAYOUT, 0, **{**good, "dst_addresses": (0,) * 5})
    with pytest.raises(InvariantError, match="handoff slot 3 is not one of 3"):
        handoff_descriptors(LAYOUT, 0, **{**good, "src_slot": 3})
