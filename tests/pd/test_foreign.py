"""Whatever comes on the control port: dropped, counted, alive. And with a cluster key nobody else gets in."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
from engines import TOY_ENGINE, EngineUnderTest, request
from toy_engine import EOS, VOCAB

from diptych.config import EngineConfig, TransferConfig
from diptych.core.request import TakeFrom
from diptych.engine.toy import expected_output
from diptych.transfer.sockets import MAX_FRAME_NBYTES

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


def resident_nbytes(engine: EngineUnderTest) -> int:
    status = Path(f"/proc/{engine.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


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
    before = resident_nbytes(engine)
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
    assert resident_nbytes(engine) - before < 300 * MIB


@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
def test_oversized_frames_take_no_memory(pair, victim: int) -> None:
    """A frame that is refused by its length is never held, be it cut off or sent in full."""
    engine = pair[victim]
    host, _, port = engine.address.address.rpartition(":")
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x04PUSH"
    before = resident_nbytes(engine)
    for nbytes in (MAX_FRAME_NBYTES + 1, 2**31, 2**62):
        for _ in range(10):
            with socket.create_connection((host, int(port))) as connection, suppress(OSError):
                connection.sendall(greeting + ready + b"\x02" + struct.pack(">Q", nbytes))
                for _ in range(64):
                    connection.sendall(bytes(MIB))
    assert resident_nbytes(engine) - before < 32 * MIB
    check_serves(*pair, f"oversized{victim}")


def noise(rng: random.Random) -> list[bytes]:
    """A message that is nearly one of ours, or nothing at all."""
    frames = rng.choice(
        [
            lambda: [rng.randbytes(rng.choice([0, 1, 8, 100, 5000])) for _ in range(rng.randrange(1, 12))],
            lambda: [
                b"NixlMsgGuard",
                *(rng.randbytes(rng.choice([0, 4, 8, 64])) for _ in range(rng.choice([7, 8, 9]))),
            ],
            lambda: [b"DiptychPeer", rng.randbytes(rng.randrange(200))],
            lambda: registration(metadata=rng.randbytes(300)),
            lambda: transfer_info(room=b"%d" % rng.getrandbits(63), pages=rng.randbytes(rng.randrange(64))),
            lambda: hello(f"i{rng.getrandbits(40)}", f"127.0.0.1:{rng.randrange(1, 2**16)}"),
            lambda: control("ghost", {"type": "Cancel", "room": rng.getrandbits(63), "generation": 0}),
        ]
    )()
    if rng.random() < 0.3:  # truncated, or a byte turned
        index = rng.randrange(len(frames))
        frames[index] = frames[index][: rng.randrange(len(frames[index]) + 1)]
    return frames


def test_a_long_noise(pair) -> None:
    """On both ports, as fast as one sender can, while requests are served."""
    stop = threading.Event()

    def send(engine: EngineUnderTest, seed: int) -> None:
        rng = random.Random(seed)
        messages = [noise(rng) for _ in range(2000)]
        with pushing(engine.address.address) as outbox:
            outbox.setsockopt(zmq.SNDTIMEO, 100)
            while not stop.is_set():
                for frames in messages:
                    with suppress(zmq.Again):
                        outbox.send_multipart(frames)
                    if stop.is_set():
                        break

    before = [resident_nbytes(engine) for engine in pair]
    counted = [engine.load().transfer.foreign_frames_total for engine in pair]
    threads = [threading.Thread(target=send, args=(engine, seed)) for seed, engine in enumerate(pair)]
    for thread in threads:
        thread.start()
    try:
        started, number = time.monotonic(), 0
        while time.monotonic() - started < NOISE_S:
            check_answers(*pair, f"noise{number}")
            number += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert number >= NOISE_S / 2, "requests take seconds amid the noise"
    for engine, rss, count in zip(pair, before, counted, strict=True):
        # Those whose port refuses are gone; the few that named no address at all are forgotten after a minute.
        engine.wait_until(lambda e=engine: e.load().transfer.num_peers < 30, "strangers to be forgotten")
        assert engine.load().transfer.foreign_frames_total > count + 1000
        assert resident_nbytes(engine) - rss < 300 * MIB
    time.sleep(1.0)
    check_serves(*pair, "calm")


def check_answers(prefill: EngineUnderTest, decode: EngineUnderTest, name: str) -> None:
    """The right answer, by transfer or not."""
    sent = request(
        name, [(3 * i + len(name)) % VOCAB for i in range(30)], prefill.address, max_tokens=5, ignore_eos=True
    )
    decode.send(sent)
    decode.wait(name)
    assert decode.tokens(name) == expected_output(sent, vocab_size=VOCAB, max_len=1024, eos_token_ids=EOS)


def test_garbage_below_zmq(pair) -> None:
    rng = random.Random(3)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    for engine in pair:
        host, _, port = engine.address.address.rpartition(":")
        held = [socket.create_connection((host, int(port))) for _ in range(50)]  # say nothing, and stay
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            rng.randbytes(10_000),
            greeting,
            greeting[:11],
            greeting + rng.randbytes(99),
            b"",
        ):
            for _ in range(20):
                with socket.create_connection((host, int(port))) as connection, suppress(OSError):
                    connection.sendall(data)
        check_serves(*pair, f"below{port}")
        for connection in held:
            connection.close()


def keyed(start_engine: Start, role: str, key: str, **options: object) -> EngineUnderTest:
    return start_engine(role, cluster_key=key, heartbeat_timeout=0.8, heartbeat_interval=0.2, **options)


def test_with_a_cluster_key(start_engine: Start) -> None:
    prefill, decode = keyed(start_engine, "prefill", "s3cret"), keyed(start_engine, "decode", "s3cret")
    check_serves(prefill, decode, "keyed")
    decode.wait_at_rest()


@pytest.mark.parametrize("key", ["other", None])
def test_without_the_right_key_nobody_gets_in(start_engine: Start, key: str | None) -> None:
    prefill = keyed(start_engine, "prefill", "s3cret")
    stranger = keyed(start_engine, "decode", key)
    with pushing(prefill.address.address) as outbox:
        outbox.send_multipart(hello("plain", "127.0.0.1:9"))
        check_answers(prefill, stranger, "mine")
        outbox.setsockopt(zmq.LINGER, 0)
    load = prefill.load().transfer
    assert (load.num_peers, load.rooms_done_total, load.foreign_frames_total) == (0, 0, 0)
    assert stranger.load().transfer.rooms_done_total == 0
    check_serves(prefill, keyed(start_engine, "decode", "s3cret"), "friend")
    stranger.wait_at_rest(timeout_s=3.0)  # nothing of what it asked can have been read


def test_who_never_answers_holds_the_pages_of_one_prompt(start_engine: Start) -> None:
    """A listener that lets us connect may have read what we asked: it keeps what it was given, and gets no more."""
    decode = start_engine("decode", heartbeat_timeout=1.5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    silent = context.socket(zmq.PULL)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    sent = [
        request(f"r{i}", [i, *range(29)], TakeFrom(f"127.0.0.1:{port}", "nobody"), max_tokens=5, ignore_eos=True)
        for i in range(20)
    ]
    for each in sent:
        decode.send(each)
    for each in sent:
        decode.wait(each.request_id, timeout_s=5.0)
        assert decode.tokens(each.request_id) == expected_output(
            each, vocab_size=VOCAB, max_len=1024, eos_token_ids=EOS
        )
    held = decode.load()
    assert held.num_owned_pages == held.num_quarantined_pages == 8, "30 tokens in pages of 4"
    silent.close()
    context.term()
    decode.wait_at_rest(timeout_s=3.0)
