"""The comparison of two ways to a model: its order, its arithmetic, and a measurement over HTTP."""

from __future__ import annotations

import pytest

from diptych.bench.apart import GOAL_S, Door, Moved, Row, measure
from diptych.bench.measure import Arrival, RequestRecord
from diptych.bench.serve import ServeOptions
from diptych.bench.workload import Vocabulary
from diptych.errors import Unavailable


def record(*at_ms: float, error: str | None = None) -> RequestRecord:
    arrivals = tuple(Arrival(at / 1e3, 1) for at in at_ms)
    return RequestRecord(
        started_s=0.0, ended_s=1.0, num_prompt_tokens=4, num_output_tokens=len(at_ms), arrivals=arrivals, error=error
    )


def test_prompts_are_compared_in_pairs():
    row = Row(
        input_len=4,
        records={
            "one": [record(10, 15, 20), record(100, 105, 110), record(50, 55, 60)],
            "two": [record(13, 23, 28), record(102, 112, 117), record(error="HTTP N")],
        },
        moved=Moved(3000, 0.006),
        num_moved=3,
    )
    assert row.added_ms("two", "one") == pytest.approx(2.5)
    assert row.second_ms("two").p50 == pytest.approx(10.0) and row.itl_ms("two").p50 == pytest.approx(5.0)
    assert row.ttft_ms("one").p50 == pytest.approx(50.0)
    assert (row.moved_nbytes, row.failures) == (1000, ["HTTP N"])
    assert row.allowed_ms == pytest.approx(1e3 * GOAL_S + 2.0)


async def test_an_engine_without_peers_tells_no_transfers(toy_url):
    doors = [Door(name=name, options=ServeOptions(url=toy_url, model="toy")) for name in ("one", "two")]
    with pytest.raises(Unavailable, match="does not say what it has sent"):
        await measure(doors, [8], prefill_url=toy_url, vocabulary=Vocabulary(200), num_prompts=2, output_len=4, seed=0)


async def test_every_door_gets_as_many_prompts(toy_url, monkeypatch):
    async def moved(session):
        return Moved(0, 0.0)

    monkeypatch.setattr("diptych.bench.apart._moved", moved)
    monkeypatch.setattr("diptych.bench.apart.PAUSE_S", 0.0)
    doors = [Door(name=name, options=ServeOptions(url=toy_url, model="toy")) for name in ("one", "two")]
    rows = await measure(
        doors, [8, 12], prefill_url=toy_url, vocabulary=Vocabulary(200), num_prompts=3, output_len=4, seed=0
    )
    assert [row.input_len for row in rows] == [8, 12]
    for row in rows:
        assert not row.failures
        assert {name: [r.num_prompt_tokens for r in found] for name, found in row.records.items()} == {
            "one": [row.input_len] * 3,
            "two": [row.input_len] * 3,
        }
