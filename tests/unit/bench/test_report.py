"""Tables, JSON and plots show what was measured."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from diptych.bench import plot
from diptych.bench.measure import Arrival, CaseResult, EngineTotals, RequestRecord, Round
from diptych.bench.report import document, print_report, write_json
from diptych.bench.workload import BenchRequest, Case
from diptych.errors import ConfigError


def result(name: str, *, error: str | None = None) -> CaseResult:
    """One round of four requests with eight tokens each, 10 ms apart; the last fails with `error`."""
    records = tuple(
        RequestRecord(
            started_s=0.0,
            ended_s=0.01 * (row + 8),
            num_prompt_tokens=5,
            num_output_tokens=8,
            arrivals=tuple(Arrival(0.01 * (row + step + 1), 1) for step in range(8)),
            queue_s=0.001,
            error=error if row == 3 else None,
        )
        for row in range(4)
    )
    engine = EngineTotals(12, 0.006, 0.12, 20, 0, 32, 0)
    return CaseResult(
        case=Case(name=name, rounds=((BenchRequest([1], 8),),)), rounds=(Round(records=records, engine=engine),)
    )


def printed(results: list[CaseResult], *notes: str) -> str:
    file = io.StringIO()
    print_report(results, notes, Console(file=file))
    return file.getvalue()


def test_tables_of_one_case():
    text = printed([result("alone", error="HTTP 503: [busy]")], "a note [x]")
    assert "time to first token" in text
    assert "queue" in text
    row = next(line for line in text.splitlines() if "alone" in line and "12" in line)
    assert "0.500" in row  # host ms a step
    assert "10.00" in row  # compute ms a step
    assert "alone: 1 failed: HTTP 503: [busy]" in text
    assert text.rstrip().endswith("a note [x]")


def test_tables_of_several_cases_fit_a_pipe():
    text = printed([result("one"), result("two")])
    assert "TTFT p50" in text
    assert "time to first token" not in text
    assert max(map(len, text.splitlines())) <= 140


def test_the_document_is_complete(tmp_path):
    path = tmp_path / "out.json"
    write_json(document([result("one", error="x")], {"command": "offline"}, with_requests=True), path)
    content = json.loads(path.read_text())
    assert content["command"] == "offline"
    assert content["host"]["cores"] >= 1
    (case,) = content["cases"]
    assert case["failures"] == {"x": 1}
    assert case["latencies_s"]["ttft"]["p50"] == pytest.approx(0.02)
    (measured,) = case["rounds"]
    assert (measured["num_requests"], measured["num_completed"], measured["num_output_tokens"]) == (4, 3, 24)
    assert measured["engine"]["host_ms_per_step"] == pytest.approx(0.5)
    assert len(measured["requests"][0]["itl_s"]) == 7


def test_requests_are_left_out_unless_wanted():
    assert "requests" not in document([result("one")], {})["cases"][0]["rounds"][0]


def test_an_unwritable_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        write_json({}, tmp_path / "missing" / "out.json")
    with pytest.raises(ConfigError, match="cannot write the plot"):
        plot.draw([result("one")], "title", tmp_path / "out.unknown")


def empty() -> CaseResult:
    record = RequestRecord(started_s=0.0, ended_s=1.0, num_prompt_tokens=1, num_output_tokens=0, error="x")
    return CaseResult(case=Case(name="empty", rounds=((),)), rounds=(Round(records=(record,)),))


@pytest.mark.parametrize("results", [[result("one")], [result("one"), empty(), result("two")], [empty()]])
def test_a_plot_is_drawn(tmp_path, results):
    path = tmp_path / "out.png"
    plot.draw(results, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_failures_alone_can_be_shown():
    assert "empty: 1 failed: x" in printed([empty()])
