"""Two engines with a bad network between their control sockets: every request is answered, and nothing is left over."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from engines import EngineUnderTest
from proxy import Fate, Proxy, kind_of
from scenes import ANSWER_S, DETECTION_S, LONG, SLOW, Start, check, take, wait_sending

from diptych.core.batch import FinishReason
from diptych.core.request import Request

REST_S = 4.0


class Pair:
    """A prefill and a decode engine that reach each other through proxies alone."""

    def __init__(self, start_engine: Start, **options: object) -> None:
        self.prefill: EngineUnderTest = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW, **options)
        self.decode: EngineUnderTest = start_engine("decode", **options)
        ports = [engine.address.address.rpartition(":")[2] for engine in (self.prefill, self.decode)]
        self.to_prefill, self.to_decode = (Proxy(int(port)) for port in ports)
        new = [str(proxy.port) for proxy in (self.to_prefill, self.to_decode)]
        assert [len(port) for port in ports] == [len(port) for port in new]
        for proxy in (self.to_prefill, self.to_decode):
            proxy.rewrite = {old.encode(): renamed.encode() for old, renamed in zip(ports, new, strict=True)}

    def send(self, name: str, length: int = LONG) -> Request:
        sent = take(self.prefill, name, length, port=self.to_prefill.port)
        self.decode.send(sent)
        return sent

    def serves(self, name: str, length: int = 21) -> None:
        """By transfer, and then both are at rest."""
        done = self.decode.load().transfer.rooms_done_total
        sent = self.send(name, length)
        self.decode.wait(name)
        check(self.decode, sent)
        assert self.decode.load().transfer.rooms_done_total == done + 1
        self.at_rest()

    def at_rest(self) -> None:
        for engine in (self.decode, self.prefill):
            engine.wait_at_rest(REST_S)

    def close(self) -> None:
        self.to_prefill.close()
        self.to_decode.close()


@pytest.fixture
def pair(start_engine: Start) -> Iterator[Pair]:
    pair = Pair(start_engine)
    yield pair
    pair.close()


def losing(kind: str, count: int = 1) -> Fate:
    """The first `count` messages of one kind are lost."""
    left = [count]

    def fate(frames: list[bytes]) -> float | None:
        if left[0] and kind_of(frames) == kind:
            left[0] -= 1
            return None
        return 0.0

    return fate


TO_PREFILL = ["Registration", "TransferInfo", "Heartbeat"]
TO_DECODE = ["HelloReply", "Joined", "FirstToken", "Quiesced", "Heartbeat"]


@pytest.mark.parametrize(
    ("end", "kind"), [*(("prefill", kind) for kind in TO_PREFILL), *(("decode", kind) for kind in TO_DECODE)]
)
def test_any_message_may_be_lost(pair: Pair, end: str, kind: str) -> None:
    proxy = pair.to_prefill if end == "prefill" else pair.to_decode
    proxy.fate = losing(kind)
    sent = pair.send("a", 60)
    pair.decode.wait("a", timeout_s=DETECTION_S + ANSWER_S)
    check(pair.decode, sent)
    assert kind in proxy.seen
    pair.at_rest()
    pair.serves("next")


def test_a_cancel_may_be_lost(pair: Pair) -> None:
    length = 2 * LONG  # more than two seconds of steps
    pair.send("a", length)
    wait_sending(pair.prefill)
    pair.to_prefill.fate = losing("Cancel")
    pair.decode.abort("a")
    pair.decode.wait("a", timeout_s=0.5)
    assert pair.decode.reason("a") is FinishReason.ABORT and pair.decode.load().num_quarantined_pages == length // 4
    for engine in (pair.decode, pair.prefill):
        engine.wait_at_rest(timeout_s=2.0)
    assert pair.to_prefill.seen.count("Cancel") == 2
    pair.serves("next")


def test_every_fourth_message_is_lost(pair: Pair) -> None:
    for proxy in (pair.to_prefill, pair.to_decode):
        proxy.fate = lambda frames, seen=proxy.seen: None if len(seen) % 4 == 3 else 0.0
    sent = [pair.send(f"r{index}", 20 + index) for index in range(12)]
    for each in sent:
        pair.decode.wait(each.request_id)
        check(pair.decode, each)
    for proxy in (pair.to_prefill, pair.to_decode):
        proxy.fate = lambda frames: 0.0
    pair.decode.wait_at_rest(10.0)
    pair.prefill.wait_at_rest(10.0)
    pair.serves("next")


def test_messages_are_late(pair: Pair) -> None:
    """By less than a heartbeat's timeout: it takes longer, and nothing fails."""
    for proxy in (pair.to_prefill, pair.to_decode):
        proxy.fate = lambda frames: 0.1
    for index in range(3):
        pair.serves(f"r{index}", 40 + index)
    assert not pair.decode.load().transfer.failures_total


def test_a_connection_is_cut_in_mid_transfer(pair: Pair) -> None:
    sent = pair.send("a")
    wait_sending(pair.prefill)
    for _ in range(3):
        pair.to_prefill.cut()
        pair.to_decode.cut()
        time.sleep(0.2)
    pair.decode.wait("a", timeout_s=DETECTION_S + ANSWER_S)
    check(pair.decode, sent)
    pair.at_rest()
    assert pair.decode.load().transfer.rooms_done_total == 1
    pair.serves("next")


@pytest.mark.parametrize("direction", ["to prefill", "to decode", "both"])
def test_a_connection_stays_cut_and_comes_back(pair: Pair, direction: str) -> None:
    sent = pair.send("a")
    wait_sending(pair.prefill)
    proxies = {"to prefill": [pair.to_prefill], "to decode": [pair.to_decode]}
    cut = proxies.get(direction, [pair.to_prefill, pair.to_decode])
    for proxy in cut:
        proxy.is_cut = True
        proxy.cut()
    cut_at = time.monotonic()
    pair.decode.wait("a", timeout_s=DETECTION_S + ANSWER_S)
    check(pair.decode, sent)
    other = pair.send("b", 30)
    pair.decode.wait("b", timeout_s=DETECTION_S + ANSWER_S)
    check(pair.decode, other)
    time.sleep(max(0.0, cut_at + DETECTION_S - time.monotonic()))
    for proxy in cut:
        proxy.is_cut = False
    for engine in (pair.decode, pair.prefill):
        engine.wait_at_rest(10.0)
        engine.wait_until(lambda e=engine: e.load().transfer.num_lost_peers == 0, "the peer to be back")
    pair.serves("next")
