"""The terminal view of engines: what it makes of reports, good and strange."""

from __future__ import annotations

import io
import socket

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


def shown(rows: list[top.EngineRow]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(top.screen(rows))
    return out.getvalue()


def test_an_engine_is_a_row():
    entry = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 12,
        "token_usage": 0.25,
        "gen_throughput": 1234.5,
        "disaggregation": {
            "mode": "decode",
            "decode_prealloc_queue_reqs": 7,
            "decode_transfer_queue_reqs": 8,
            "kv_transfer_speed_gb_s": 3.21,
            "kv_transfer_latency_ms": 4.5,
        },
    }
    (row,) = top.rows_of("http://d", {"loads": [entry]})
    assert (row.url, row.role, row.running) == ("http://d", "decode", 3)
    text = shown([row])
    assert "3 running  12 waiting  1,234.5 tok/s" in text
    assert text.splitlines()[-1].split() == [
        "d",
        "decode",
        "healthy",
        "3",
        "12",
        "7+8",
        "25%",
        "1,234.5",
        "3.21",
        "4.5",
    ]


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
    assert top.run([f"http://127.0.0.1:{port}", "--once"]) == 1
    assert "down" in capsys.readouterr().out


def test_a_wrong_interval_is_refused():
    with pytest.raises(ConfigError, match="--interval"):
        top.run(["--interval", "0"])
