"""The terminal view of engines: what it makes of reports, good and strange."""

from __future__ import annotations

import dataclasses
import io
import socket
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diptych.cli import top
from diptych.errors import ConfigError

values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["loads", "disaggregation", "mode", "worker", "state", "token_usage"]), inner)
    ),
    max_leaves=10,
)


def shown(rows: list[top.EngineRow], before: Sequence[top.EngineRow] = ()) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(top.screen(rows, before))
    return out.getvalue()


ENTRY = {
    "num_running_reqs": 3,
    "num_waiting_reqs": 12,
    "token_usage": 0.25,
    "gen_throughput": 1234.5,
    "prompt_tokens": 10_000,
    "disaggregation": {
        "mode": "decode",
        "prefill_bootstrap_queue_reqs": 0,
        "decode_prealloc_queue_reqs": 7,
        "decode_transfer_queue_reqs": 8,
        "kv_transfer_speed_gb_s": 3.21,
        "transport": "shm",
        "failures": {"CANCELLED": 5, "PEER_LOST": 2},
    },
}


def test_an_engine_is_a_row():
    (row,) = top.rows_of("http://d", {"loads": [ENTRY]})
    assert (row.url, row.role, row.running) == ("http://d", "decode", 3)
    lines = shown([row]).splitlines()
    assert "1 of 1 engines healthy  15 requests  1,234 tok/s" in lines[0]
    head, figures = lines[2].split(), lines[3].split()
    assert head[3:] == ["run", "wait", "land", "KV", "out/s", "GB/s", "over", "failed"]
    assert figures == ["d", "decode", "healthy", "3", "12", "15", "25%", "1,234", "3.21", "shm", "2"]


def test_rates_come_from_two_looks():
    (before,) = top.rows_of("http://p", {"loads": [{**ENTRY, "role": "prefill"}]})
    after = dataclasses.replace(before, at_s=before.at_s + 2.0, prompt_tokens=13_000)
    text = shown([after], [before])
    assert "in/s" in text.splitlines()[2] and "1,500" in text
    restarted = dataclasses.replace(after, prompt_tokens=5.0)
    assert "in/s" not in shown([restarted], [before]).splitlines()[2]


def test_a_request_of_two_engines_is_one():
    rows = top.rows_of("", {"loads": [{**ENTRY, "role": "prefill", "worker": "p"}, {**ENTRY, "worker": "d"}]})
    assert "2 of 2 engines healthy  15 requests  1,234 tok/s" in shown(rows)


def test_columns_that_nobody_reports_are_left_out():
    (row,) = top.rows_of("http://d", {"loads": [{"num_running_reqs": 3}]})
    assert shown([row]).splitlines()[-2].split() == ["engine", "role", "state", "run"]


def test_a_router_names_its_engines():
    report = {"loads": [{"worker": "http://p", "role": "prefill", "state": "down"}, {"worker": "http://[x]"}]}
    assert [(row.url, row.role, row.state) for row in top.rows_of("http://router", report)] == [
        ("http://p", "prefill", "down"),
        ("http://[x]", "unified", "healthy"),
    ]
    assert "[x]" in shown(top.rows_of("http://router", report))


@given(values)
def test_no_report_breaks_the_screen(report):
    shown(top.rows_of("http://e", report))


def test_an_engine_that_does_not_answer_is_a_row_too(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert top.run([f"http://127.0.0.1:{port}", "--once", "--interval", "0.1"]) == 1
    assert "down" in capsys.readouterr().out


def test_a_wrong_interval_is_refused():
    with pytest.raises(ConfigError, match="--interval"):
        top.run(["--interval", "0"])
