"""Whatever comes on the control port: dropped, counted, alive. And with a cluster key nobody else gets in."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import psutil
import pytest
import zmq
from conftest import TOY_ENGINE, EngineUnderTest, request
from toy_engine import EOS, VOCAB

from diptych.config import EngineConfig, TransferConfig
from diptych.engine.toy import expected_output

Start = Callable[..., EngineUnderTest]
MIB = 2**20
# Seconds of noise; more for a night run.
NOISE_S = float(os.environ.get("DIPTYCH_NOISE_S", "8"))


@contextmanager
def pushing(address: str) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = context.socket(zmq.PUSH)
    outbox.connect(f"tcp://{address}")
    try:
        yield outbox
    finally:
        outbox.close(linger=2000)
        context.term()


def check_serves(prefill: EngineUnderTest, decode: EngineUnderTest, name: str, timeout_s: float = 10.0) -> None:
    sent = request(
        name, [(3 * i + len(name)) % VOCAB for i in range(30)], prefill.address, max_tokens=5, ignore_eos=True
    )
    done = decode.load().transfer.rooms_done_total
    decode.send(sent)
    decode.wait(name, timeout_s)
    assert decode.tokens(name) == expected_output(sent, vocab_size=VOCAB, max_len=1024, eos_token_ids=EOS)
    assert decode.load().transfer.rooms_done_total == done + 1, "it was not served by transfer"


def layout(**changes: object) -> dict[str, object]:
    fields = {
        "first_layer": 0,
        "num_layers": 1,
        "first_kv_head": 0,
        "num_kv_heads": 1,
        "head_dim": 1,
        "page_size": 4,
        "dtype": "float32",
        "num_pages": 512,
        "stride": 32,
    }
    return fields | changes


def identity(instance: str, endpoint: str, **changes: object) -> dict[str, object]:
    fields = {
        "instance_id": instance,
        "layout": layout(),
        "model_layers": 1,
        "model_kv_heads": 1,
        "model_fingerprint": "toy",
        "control_endpoint": endpoint,
        "num_top_logprobs": 128,
    }
    return fields | changes


def sealed(body: object) -> bytes:
    return msgspec.msgpack.encode(["diptych", 1, body])


def control(instance: str, message: dict[str, object]) -> list[bytes]:
    return [b"DiptychPeer", sealed([instance, message])]


def hello(instance: str, endpoint: str, **changes: object) -> list[bytes]:
    return control(instance, {"type": "Hello", "identity": identity(instance, endpoint, **changes), "nonce": 1})


def registration(**changes: bytes) -> list[bytes]:
    frames = {
        "guard": b"NixlMsgGuard",
        "room": b"None",
        "endpoint": b"127.0.0.1",
        "port": b"9",
        "agent": b"someone",
        "metadata": b"x" * 100,
        "kv": struct.pack("<2Q", 4096, 8192),
        "aux": struct.pack("<6Q", *range(1, 7)),
        "gpu": b"0",
    }
    return list((frames | changes).values())


def transfer_info(**changes: bytes) -> list[bytes]:
    frames = {
        "guard": b"NixlMsgGuard",
        "room": b"17",
        "endpoint": b"127.0.0.1",
        "port": b"9",
        "agent": b"someone",
        "pages": struct.pack("<3i", 1, 2, 3),
        "slot": b"0",
        "ranks": b"1",
    }
    return list((frames | changes).values())


BAD_ENDPOINTS = [
    "",
    "nowhere",
    "127.0.0.1",
    ":1",
    "127.0.0.1:99999",
    "a..b:80",
    "[::1]:x",
    "10.255.255.1:81",
    "*:80",
    "é:1",
]

HOSTILE = {
    "a_hello_from_nowhere": [hello(f"n{i}", endpoint) for i, endpoint in enumerate(BAD_ENDPOINTS)],
    "a_huge_page": [
        [
            *registration(),
            sealed(identity("huge", "127.0.0.1:9", layout=layout(page_size=2**31 - 1, stride=8 * (2**31 - 1)))),
        ]
    ],
    "pages_that_divide_nothing": [
        [*registration(), sealed(identity("odd", "127.0.0.1:9", layout=layout(page_size=65521, stride=8 * 65521)))]
    ],
    "an_endpoint_without_host": [[*registration(endpoint=b"%%"), sealed(identity("pct", "127.0.0.1:9"))]],
    "an_endpoint_that_needs_a_name_server": [
        [*registration(endpoint=b"nobody.invalid"), sealed(identity("dns", "nobody.invalid:9"))]
    ],
    "pickles": [
        [pickle.dumps(os.getcwd)],
        [b"NixlMsgGuard", *[pickle.dumps([])] * 8],
        [b"DiptychPeer", pickle.dumps({})],
    ],
    "metadata_that_look_right": [
        registration(
            agent=b"agent%d" % i, metadata=b"nixlSerDes|Agent" + struct.pack("<Q", 6) + b"agent%d" % i + os.urandom(200)
        )
        for i in range(3)
    ],
    "rooms_of_strangers": [transfer_info(room=b"%d" % i) for i in range(2000)],
    "numbers_out_of_bounds": [
        transfer_info(**{name: value})
        for name in ("room", "port", "slot", "ranks")
        for value in (b"", b"-1", b"9" * 19, b"9" * 4000, b"1e3", b"\xb2", b"None", b"0x10")
    ],
    "pages_out_of_bounds": [
        transfer_info(pages=pages)
        for pages in (b"\1", struct.pack("<2i", 1, 1), struct.pack("<i", -1), b"\0" * 8 * MIB, os.urandom(4000))
    ],
    "thousands_of_frames": [[b"NixlMsgGuard"] * 50_000, [b""] * 50_000, [b"DiptychPeer", *[b"x"] * 50_000]],
    "nested_msgpack": [
        [b"DiptychPeer", b"\x93\xa7diptych\x01" + b"\x91" * 100_000],
        [*transfer_info(), b"\x91" * 10**6],
    ],
    "control_without_sense": [
        control("ghost", {"type": kind, "room": 1, "generation": 1})
        for kind in ("Cancel", "Quiesced", "Joined", "Other")
    ],
    "an_oversized_frame": [[b"NixlMsgGuard", b"x" * (33 * MIB)]],
    "megabytes_of_nothing": [[b"NixlMsgGuard", b"x" * (8 * MIB)] for _ in range(100)],
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[EngineUnderTest, EngineUnderTest]]:
    engines = [
        EngineUnderTest(role, [sys.executable, str(TOY_ENGINE)], EngineConfig(transfer=TransferConfig(role=role)), {})
        for role in ("prefill", "decode")
    ]
    yield engines[0], engines[1]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
def test_hostile_messages(pair, victim: int, name: str) -> None:
    engine = pair[victim]
    before = psutil.Process(engine.process.pid).memory_info().rss
    with pushing(engine.address.address) as outbox:
        for frames in HOSTILE[name]:
            outbox.send_multipart(frames)
    started = time.monotonic()
    engine.load()
    assert time.monotonic() - started < 1.0, "the engine's loop was held up"
    time.sleep(0.3)
    assert engine.process.poll() is None
    check_serves(*pair, f"{name}{victim}")
    for each in pair:
        each.wait_at_rest()
    assert psutil.Process(engine.process.pid).memory_info().rss - before < 300 * MIB
