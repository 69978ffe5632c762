"""What the doctor says of a prefill engine, from what its registry tells."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest

from diptych.cli import doctor_peer
from diptych.cli.doctor_peer import examine_peer, is_here, parse_peer
from diptych.cli.main import main
from diptych.errors import ConfigError
from diptych.transfer.extension import PROTOCOL_VERSION

SUMMARY = {
    "prefill_tp_size": 1, "prefill_dp_size": 1, "prefill_pp_size": 1, "instance_id": "abc", "fingerprint": "f1",
    "protocol_version": PROTOCOL_VERSION, "architecture": "X", "dtype": "bfloat16", "page_size": 16, "num_layers": 2,
    "num_kv_heads": 1, "head_dim": 8,
}  # fmt: skip


class StandIn:
    """A registry that says what it is told to. status, summary, route: of its answers."""

    def __init__(self, control_port: int) -> None:
        self.status = 200
        self.summary = dict(SUMMARY)
        self.route = {"rank_ip": "127.0.0.1", "rank_port": control_port, "instance_id": "abc"}
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                rank = parse_qs(urlsplit(self.path).query)["engine_rank"]
                body = orjson.dumps(stand_in.summary if rank == ["-1"] else stand_in.route)
                self.send_response(stand_in.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.peer = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def registry() -> Iterator[StandIn]:
    with socket.create_server(("127.0.0.1", 0)) as control:
        stand_in = StandIn(control.getsockname()[1])
        thread = threading.Thread(target=stand_in.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield stand_in
        stand_in.server.shutdown()
        thread.join()
        stand_in.server.server_close()


@pytest.fixture(autouse=True)
def _no_bench(monkeypatch) -> None:
    """What moves bytes is tested with real engines (tests/e2e), and by `diptych bench transfer`."""
    monkeypatch.setattr(doctor_peer, "_measured_here", lambda rank_ip: [])
    monkeypatch.setattr(doctor_peer, "_received", lambda answers: [])


def by_name(peer: str, model_path: str | None = None):
    return {finding.name: finding for finding in examine_peer(peer, model_path)}


def test_a_good_peer(registry, capsys):
    found = by_name(registry.peer)
    assert {name: finding.mark for name, finding in found.items()} == {
        "registry": "ok",
        "engine": "ok",
        "protocol": "ok",
        "control socket": "ok",
        "KV layout": "ok",
        "weights": "info",
    }
    assert "instance abc" in found["engine"].value and "2 layers x 1 KV heads x 8" in found["KV layout"].value
    assert main(["doctor", "--peer", registry.peer]) == 0
    assert "instance abc" in capsys.readouterr().out


def test_what_does_not_fit_is_named_on_both_sides(registry):
    registry.summary["protocol_version"] = 99
    found = by_name(registry.peer)
    assert found["protocol"].mark == "warn" and f"99 there, {PROTOCOL_VERSION} here" in found["protocol"].note


def test_another_make(registry):
    registry.summary = {"prefill_tp_size": 2, "prefill_dp_size": 1}
    found = by_name(registry.peer)
    assert found["protocol"].value == "base format" and found["KV layout"].value == "not told"


def test_weights_are_compared(registry, demo_model):
    found = by_name(registry.peer, str(demo_model))
    assert found["weights"].mark == found["KV layout"].mark == "warn"
    assert "f1" in found["weights"].value and str(demo_model) in found["weights"].note
    found = by_name(registry.peer, "no/such/model")
    assert "nothing to compare with" in found["weights"].note


def test_a_dead_control_socket(registry):
    with socket.create_server(("127.0.0.1", 0)) as free:
        registry.route["rank_port"] = free.getsockname()[1]
    assert by_name(registry.peer)["control socket"].mark == "warn"


def test_no_registry(registry):
    registry.status = 503
    assert "not ready" in by_name(registry.peer)["registry"].note
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (finding,) = examine_peer(f"127.0.0.1:{port}", None)
    assert finding.mark == "warn" and "cannot be reached" in finding.note


def test_addresses():
    assert parse_peer("a:1") == ("a", 1) and parse_peer("a") == ("a", 8998) and parse_peer("[::1]:5") == ("::1", 5)
    for wrong in ("", ":1", "a:b", "a:0", "a:70000"):
        with pytest.raises(ConfigError, match="--peer must be HOST:PORT"):
            parse_peer(wrong)
    assert is_here("127.0.0.1") and is_here("localhost") and not is_here("192.0.2.1")
