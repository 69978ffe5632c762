"""What passes, what does not, and the names of a request."""

from __future__ import annotations

import pytest

from diptych.router.headers import forwarded, identity_of, returned

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        TRACE[:-1],
        TRACE.upper(),
        "ff" + TRACE[2:],
        TRACE.replace("a", "0"),
        TRACE.replace("b", "0"),
        TRACE + "\n",
    ],
)
def test_an_invalid_traceparent_is_replaced(bad):
    made = identity_of("r", bad)
    assert made.traceparent != bad
    assert identity_of("r", made.traceparent).traceparent == made.traceparent


@pytest.mark.parametrize("bad", ["", "x" * 257, "a\nb", "caf\u00e9"])
def test_an_invalid_request_id_is_replaced(bad):
    made = identity_of(bad, TRACE)
    assert len(made.request_id) == 32
    assert made.trace_id == "a" * 32


def test_headers_of_the_connection_stay_behind():
    sent = [
        ("host", "x"),
        ("connection", "keep-alive, x-secret"),
        ("x-secret", "1"),
        ("transfer-encoding", "chunked"),
        ("content-length", "3"),
        ("x-override-bootstrap-host", "evil"),
        ("authorization", "Bearer client"),
        ("content-type", "application/json"),
        ("x-request-id", "old"),
    ]
    identity = identity_of("r", TRACE)
    kept = [("authorization", "Bearer client"), ("content-type", "application/json")]
    names = [("x-request-id", "r"), ("traceparent", TRACE)]
    assert forwarded(sent, identity, None) == [*kept, *names]
    assert forwarded(sent, identity, "key") == [kept[1], ("authorization", "Bearer key"), *names]


def test_headers_of_the_answer():
    got = [(b"content-type", b"a"), (b"date", b"d"), (b"transfer-encoding", b"chunked"), (b"x-request-id", b"theirs")]
    assert returned(got, identity_of("r", TRACE)) == [(b"content-type", b"a"), (b"x-request-id", b"r")]
