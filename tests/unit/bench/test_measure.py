"""The arithmetic of what is measured, on times made up for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.measure import (
    Arrival,
    CaseResult,
    Distribution,
    EngineTotals,
    Latencies,
    RequestRecord,
    Round,
    open_requests_timeline,
    output_timeline,
)
from diptych.bench.workload import Case, Headline
from diptych.core.messages import EngineLoad


def record(times: list[float], started_s: float = 0.0, num_tokens: int = 1, **fields: object) -> RequestRecord:
    """A request whose outputs of `num_tokens` tokens arrived at `times`."""
    arrivals = tuple(Arrival(at_s, num_tokens) for at_s in times)
    return RequestRecord(
        started_s=started_s,
        ended_s=times[-1] if times else started_s,
        num_prompt_tokens=10,
        num_output_tokens=num_tokens * len(times),
        arrivals=arrivals,
        **fields,
    )


def test_times_of_a_request():
    made = record([1.5, 2.0, 3.5], started_s=1.0)
    assert (made.ttft_s, made.e2e_s, made.tpot_s) == (0.5, 2.5, 1.0)
    assert made.itl_s == [0.5, 1.5]


def test_tokens_that_arrive_together_share_their_gap():
    made = record([1.0, 3.0], num_tokens=4)
    assert made.itl_s == [2.0]
    assert made.tpot_s == 0.5


def test_a_request_without_output_has_no_latencies():
    made = record([])
    assert (made.ttft_s, made.tpot_s, made.itl_s) == (None, None, [])
    assert record([1.0]).tpot_s is None


def test_distribution_of_known_values():
    made = Distribution.of([None, *map(float, range(101))])
    assert made == Distribution(count=101, mean=50.0, p50=50.0, p90=90.0, p99=99.0, max=100.0)
    assert Distribution.of([None]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered(values):
    made = Distribution.of(values)
    assert min(values) <= made.p50 <= made.p90 <= made.p99 <= made.max == max(values)


def test_rates_of_a_round():
    made = Round(records=(record([1.0, 2.0]), record([2.0, 4.0])))
    assert made.duration_s == 4.0
    assert (made.input_rate, made.output_rate, made.request_rate) == (5.0, 1.0, 0.5)
    assert made.ms_per_token == 2000.0


def test_failed_requests_count_in_nothing_but_failures():
    made = Round(records=(record([1.0, 2.0]), record([9.0], error="HTTP 503"), record([], error="HTTP 503")))
    assert made.failures == {"HTTP 503": 2}
    assert made.num_output_tokens == 2
    assert Latencies.of(made.completed).ttft.count == 1


def test_a_round_of_failures_has_no_rates():
    made = Round(records=(record([], error="x"),))
    assert (made.output_rate, made.decode_rate, made.ms_per_token) == (None, None, None)
    assert Round(records=()).duration_s == 0.0


@given(batch=st.integers(1, 8), steps=st.integers(4, 30), step_s=st.floats(0.01, 1.0))
def test_decode_rate_does_not_depend_on_the_order_within_a_step(batch, steps, step_s):
    """One sequence joins a step; outputs of a step reach their readers one after the other."""
    records = []
    for row in range(batch):
        delay_s = row * step_s * 1e-3
        records.append(record([step * step_s + delay_s for step in range(row, steps + batch)]))
    made = Round(records=tuple(records))
    assert made.decode_rate == pytest.approx(batch / step_s)


def test_decode_rate_needs_time_in_which_all_decode():
    assert Round(records=(record([1.0, 2.0]), record([3.0, 4.0]))).decode_rate is None
    assert Round(records=(record([1.0]),)).decode_rate is None


def test_engine_totals_are_differences():
    before = EngineTotals.of(EngineLoad(timestamp=0.0, steps_total=10, host_s_total=1.0, compute_s_total=2.0))
    after = EngineTotals.of(
        EngineLoad(timestamp=9.0, steps_total=30, host_s_total=1.1, compute_s_total=6.0, generation_tokens_total=5)
    )
    made = after.since(before)
    assert made.host_ms_per_step == pytest.approx(5.0)
    assert made.compute_ms_per_step == pytest.approx(200.0)
    assert made.generation_tokens == 5
    assert after.since(after).host_ms_per_step is None
    assert made.plus(made).steps == 40


def test_median_and_best_of_rounds():
    rounds = tuple(Round(records=(record([1.0, last]),)) for last in (2.0, 4.0, 5.0))
    rate = CaseResult(case=Case(name="a", rounds=((),)), rounds=rounds)
    assert rate.median(Headline.OUTPUT_RATE) == 0.5
    assert rate.best() == 1.0
    latency = CaseResult(case=Case(name="a", rounds=((),), headline=Headline.MS_PER_TOKEN), rounds=rounds)
    assert latency.best() == 1000.0
    assert CaseResult(case=Case(name="a", rounds=((),)), rounds=()).best() is None


@given(st.lists(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40).map(sorted), min_size=1, max_size=5))
def test_the_output_timeline_accounts_for_every_token(requests):
    records = [record(times) for times in requests]
    middles, rates = output_timeline(records)
    width = 2 * middles[0]
    assert sum(rates) * width == pytest.approx(sum(map(len, requests)))


def test_timelines():
    assert output_timeline([]) == ([], [])
    records = [record([2.0], started_s=1.0), record([4.0], started_s=1.0)]
    assert open_requests_timeline(records) == ([0.0, 1.0, 1.0, 2.0, 4.0], [0, 1, 2, 1, 0])
