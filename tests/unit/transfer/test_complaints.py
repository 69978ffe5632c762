"""Log lines about what others do wrong: few, whoever floods us, with counts that are exact."""

from __future__ import annotations

import logging

import pytest

from diptych.transfer.complaints import INTERVAL_S, MAX_ADDRESSES, Complaints


@pytest.fixture
def complaints(caplog) -> Complaints:
    caplog.set_level(logging.INFO)
    return Complaints(logging.getLogger("test"))


def test_one_line_a_minute_for_each_kind_and_address_with_a_count(complaints, caplog) -> None:
    for second in range(130):
        complaints.now = float(second)
        for address in ("a:1", "b:1"):
            complaints.say("refused", address, f"{address} is refused")
    complaints.say("silent", "a:1", "a:1 is silent", level=logging.ERROR)
    lines = [record.message for record in caplog.records]
    more = " (59 more of this kind since the last such line)"
    assert lines[:2] == ["a:1 is refused", "b:1 is refused"]
    assert lines[2:] == [f"{a}:1 is refused{more}" for a in "abab"] + ["a:1 is silent"]
    assert caplog.records[-1].levelno == logging.ERROR
    assert complaints.totals == {"refused": 260, "silent": 1}


def test_addresses_that_never_end_share_a_line(complaints, caplog) -> None:
    for number in range(10_000):
        complaints.now = number / 1000
        complaints.say("refused", f"{number}:1", f"{number} is refused")
    assert len(caplog.records) == MAX_ADDRESSES + 1 and complaints.totals["refused"] == 10_000
    complaints.now += 2 * INTERVAL_S + 1
    caplog.clear()
    complaints.say("refused", "new:1", "new is refused")
    assert [record.message for record in caplog.records] == ["new is refused"]
