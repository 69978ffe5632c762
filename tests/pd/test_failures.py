"""Engines killed, restarted and frozen: every request is answered in time and right, and the survivor goes on at
rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from engines import EngineUnderTest, request
from toy_engine import EOS, VOCAB

from diptych.core.batch import FinishReason
from diptych.core.messages import Drain
from diptych.core.request import HandTo, Request, TakeFrom
from diptych.engine.toy import expected_output

DETECTION_S = 3.0  # promised for the defaults
ANSWER_S = 2.0
SLOW = {"TOY_STEP_S": "0.05"}  # 25 steps of 16 tokens for LONG
LONG = 400
# Where the defaults are not what is tested.
QUICK = {"heartbeat_interval": 0.2, "heartbeat_timeout": 0.8}

Start = Callable[..., EngineUnderTest]


def expected(sent: Request) -> list[int]:
    return expected_output(sent, vocab_size=VOCAB, max_len=1024, eos_token_ids=EOS)


def prompt_of(length: int, start: int = 11) -> list[int]:
    return [(start + 3 * i) % VOCAB for i in range(length)]


def take(engine: EngineUnderTest, name: str, length: int = LONG, room: int | None = None) -> Request:
    """A request that `engine` computes the prompt of."""
    address = engine.address
    handoff = TakeFrom(address.address, address.instance_id, room)
    return request(name, prompt_of(length, sum(name.encode()) % VOCAB), handoff, max_tokens=6, ignore_eos=True)


def check(decode: EngineUnderTest, sent: Request) -> None:
    assert decode.tokens(sent.request_id) == expected(sent)
    assert decode.reason(sent.request_id) is FinishReason.LENGTH


def wait_sending(prefill: EngineUnderTest) -> None:
    """Until pages are under way, and more is to come."""
    prefill.wait_until(lambda: prefill.load().transfer.bytes_sent_total > 500, "the first pages to be sent")


def serve_next(decode: EngineUnderTest, prefill: EngineUnderTest, name: str = "next", *, at_rest: bool = True) -> None:
    """A pair that serves as if nothing had been."""
    done = decode.load().transfer.rooms_done_total
    sent = take(prefill, name, 21)
    decode.send(sent)
    decode.wait(name)
    check(decode, sent)
    assert decode.load().transfer.rooms_done_total == done + 1
    if at_rest:
        prefill.wait_at_rest()
    decode.wait_at_rest()


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_prefill_is_killed(start_engine: Start, when: str) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode", environment=SLOW)
    sent = take(prefill, "a")
    if when != "before":
        decode.send(sent)
        wait_sending(prefill)
    if when == "after":
        decode.wait_until(lambda: decode.load().transfer.rooms_done_total == 1, "the pages to land")
    prefill.kill()
    if when == "before":
        decode.send(sent)
    killed_at = time.monotonic()
    decode.wait("a")
    assert time.monotonic() - killed_at < DETECTION_S + ANSWER_S
    check(decode, sent)
    decode.wait_at_rest()
    other = start_engine("prefill")
    serve_next(decode, other)


def test_prefill_is_killed_under_many_rooms(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=64, environment=SLOW)
    decode = start_engine("decode")
    sent = [take(prefill, f"r{index}", 30 + index) for index in range(30)]
    for each in sent:
        decode.send(each)
    decode.wait_until(lambda: decode.load().transfer.rooms_done_total >= 3, "some to land")
    prefill.kill()
    killed_at = time.monotonic()
    for each in sent:
        decode.wait(each.request_id)
        check(decode, each)
    assert time.monotonic() - killed_at < DETECTION_S + ANSWER_S
    decode.wait_at_rest()


def test_without_local_prefill_a_killed_prefill_is_an_error(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode", local_prefill=False)
    decode.send(take(prefill, "a"))
    wait_sending(prefill)
    prefill.kill()
    killed_at = time.monotonic()
    decode.wait("a")
    assert time.monotonic() - killed_at < DETECTION_S + ANSWER_S
    for name in ("a", "b"):
        failure = decode.failure(name)
        assert failure is not None and failure.kind == "PeerLost" and prefill.address.address in failure.message
        decode.send(take(prefill, "b"))
        decode.wait("b", timeout_s=DETECTION_S)
    decode.wait_at_rest()


def test_decode_is_killed(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode")
    decode.send(take(prefill, "a"))
    decode.send(take(prefill, "told", room=77))
    prefill.send(request("told", prompt_of(LONG, sum(b"told") % VOCAB), HandTo(77), max_tokens=6, ignore_eos=True))
    prefill.send(request("unasked", prompt_of(9), HandTo(78), max_tokens=6))
    wait_sending(prefill)
    decode.kill()
    killed_at = time.monotonic()
    prefill.wait("told")
    assert time.monotonic() - killed_at < DETECTION_S + ANSWER_S
    failure = prefill.failure("told")
    assert failure is not None and failure.kind == "PeerLost"
    prefill.abort("unasked")
    prefill.wait_at_rest(timeout_s=1.0)
    serve_next(start_engine("decode"), prefill)


def test_prefill_restarts_on_its_port(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    port = int(prefill.address.address.rpartition(":")[2])
    decode = start_engine("decode")
    old = take(prefill, "old")
    decode.send(old)
    wait_sending(prefill)
    prefill.kill()
    killed_at = time.monotonic()
    again = start_engine("prefill", peer_port=port, max_num_batched_tokens=16)
    assert again.address.address == prefill.address.address
    assert again.address.instance_id != prefill.address.instance_id
    new = take(again, "new", 33)
    decode.send(new)
    decode.wait("new")
    check(decode, new)
    decode.wait("old")
    check(decode, old)
    assert time.monotonic() - killed_at < DETECTION_S + ANSWER_S
    stale = take(prefill, "stale", 20)  # its registry was asked before the restart
    decode.send(stale)
    decode.wait("stale", timeout_s=DETECTION_S)
    check(decode, stale)
    decode.wait_at_rest()
    assert decode.load().transfer.rooms_done_total == 1
    serve_next(decode, again)


def test_decode_restarts_on_its_port(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW, **QUICK)
    decode = start_engine("decode", **QUICK)
    port = int(decode.address.address.rpartition(":")[2])
    decode.send(take(prefill, "old"))
    wait_sending(prefill)
    decode.kill()
    again = start_engine("decode", peer_port=port, **QUICK)
    serve_next(again, prefill)
    prefill.wait_until(lambda: prefill.load().transfer.num_peers == 1, "the old instance to be forgotten", 3.0)


@pytest.mark.parametrize("told", ["decode", "both"])
def test_prefill_freezes_and_thaws(start_engine: Start, told: str) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode")
    sent = take(prefill, "a", room=5 if told == "both" else None)
    decode.send(sent)
    if told == "both":
        prefill.send(request("a", sent.prompt_token_ids, HandTo(5), max_tokens=6))
    wait_sending(prefill)
    prefill.freeze()
    frozen_at = time.monotonic()
    decode.wait("a")
    assert time.monotonic() - frozen_at < DETECTION_S + ANSWER_S
    check(decode, sent)
    load = decode.load()
    assert load.num_quarantined_pages >= LONG // 4 and load.transfer.num_lost_peers == 1
    other = take(prefill, "b", 40)
    decode.send(other)  # nobody waits for a peer that is known to be silent
    decode.wait("b", timeout_s=1.0)
    check(decode, other)
    assert decode.load().num_quarantined_pages == load.num_quarantined_pages
    prefill.thaw()
    decode.wait_at_rest(timeout_s=2.0)
    prefill.wait_at_rest(timeout_s=2.0)
    serve_next(decode, prefill)


def test_a_frozen_prefill_dies(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW, **QUICK)
    decode = start_engine("decode", **QUICK)
    decode.send(take(prefill, "a"))
    decode.send(take(prefill, "cancelled"))
    wait_sending(prefill)
    prefill.freeze()
    decode.abort("cancelled")
    decode.wait("a")
    assert decode.load().num_quarantined_pages
    prefill.kill()
    decode.wait_at_rest(timeout_s=3.0)


def test_decode_freezes_and_thaws(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode")
    sent = take(prefill, "a")
    decode.send(sent)
    wait_sending(prefill)
    decode.freeze()
    prefill.wait_until(lambda: prefill.load().transfer.failures_total == {"PEER_LOST": 1}, "the loss", DETECTION_S)
    other = start_engine("decode")
    serve_next(other, prefill, at_rest=False)
    decode.thaw()
    thawed_at = time.monotonic()
    decode.wait("a")
    assert time.monotonic() - thawed_at < ANSWER_S
    check(decode, sent)
    decode.wait_at_rest()
    serve_next(decode, prefill)


@pytest.mark.parametrize("frozen", ["prefill", "decode"])
def test_a_frozen_peer_does_not_keep_the_other_from_ending(start_engine: Start, frozen: str) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode")
    decode.send(take(prefill, "a"))
    wait_sending(prefill)
    held, ending = (prefill, decode) if frozen == "prefill" else (decode, prefill)
    held.freeze()
    if frozen == "prefill":
        decode.abort("a")
    ending.channel.send(Drain(0.5))
    assert ending.process.wait(DETECTION_S + ANSWER_S) == 0
    held.thaw()
    if frozen == "decode":
        decode.wait("a")
    held.wait_at_rest()


def test_a_room_without_a_prompt_does_not_keep_prefill_from_ending(start_engine: Start) -> None:
    prefill, decode = start_engine("prefill"), start_engine("decode")
    sent = take(prefill, "a", room=9)
    decode.send(sent)
    prefill.wait_until(lambda: prefill.load().transfer.num_outgoing_rooms == 1, "the room")
    prefill.channel.send(Drain(0.5))
    assert prefill.process.wait(DETECTION_S) == 0
    decode.wait("a", timeout_s=DETECTION_S + ANSWER_S)
    check(decode, sent)
    decode.wait_at_rest()


def test_a_short_freeze_costs_nothing_but_time(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode")
    sent = take(prefill, "a")
    decode.send(sent)
    wait_sending(prefill)
    for engine in (prefill, decode):
        engine.freeze()
        time.sleep(1.0)
        engine.thaw()
    decode.wait("a")
    check(decode, sent)
    assert decode.load().transfer.rooms_done_total == 1
    serve_next(decode, prefill)
