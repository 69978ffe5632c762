"""Cutting streams into whole events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.router.events import MAX_HELD_NBYTES, is_last, split_events


@given(st.lists(st.sampled_from([b"data: a\n\n", b"data: b\r\n\r\n", b": ping\n\n"]), max_size=6), st.data())
def test_whole_events_come_out_and_nothing_is_lost(events, data):
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    held, out = b"", []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        whole, held = split_events(held, stream[start:end])
        assert whole == b"" or whole.endswith((b"\n\n", b"\r\n\r\n"))
        out.append(whole)
    assert b"".join(out) + held == stream
    assert held == b""


def test_a_huge_event_is_not_held_back():
    whole, held = split_events(b"x" * MAX_HELD_NBYTES, b"yy")
    assert (len(whole), held) == (MAX_HELD_NBYTES + 2, b"")


@pytest.mark.parametrize(("text", "expected"), [(b"data: 1\n\ndata: [DONE]\n\n", True), (b"data: 1\n\n", False)])
def test_the_last_event_is_known(text, expected):
    assert is_last(text) is expected
