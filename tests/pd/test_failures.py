"""Engines killed and restarted: every request is answered in time and right, and the survivor goes on at rest."""

from __future__ import annotations

import time

import pytest
from engines import request
from scenes import ANSWER_S, DETECTION_S, LONG, QUICK, SLOW, Start, check, prompt_of, serve_next, take, wait_sending
from toy_engine import VOCAB

from diptych.core.messages import Drain
from diptych.core.request import HandTo


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
