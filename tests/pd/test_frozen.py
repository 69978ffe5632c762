"""Engines that freeze (SIGSTOP): nobody waits for them, and what they may still write stays in quarantine."""

from __future__ import annotations

import time

import pytest
from engines import request
from scenes import ANSWER_S, DETECTION_S, LONG, QUICK, SLOW, Start, check, serve_next, take, wait_sending

from diptych.core.messages import Drain
from diptych.core.request import HandTo


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


def test_a_frozen_decode_engine_holds_no_slot(start_engine: Start) -> None:
    """Its pages are pinned for long here, since it is not taken for lost; who comes next needs a slot alone.

    It freezes before the agents have met: then no write to it can end.
    """
    prefill = start_engine("prefill", max_num_seqs=1, environment=SLOW, heartbeat_timeout=60.0)
    frozen, other = start_engine("decode"), start_engine("decode")
    frozen.send(take(prefill, "a"))
    prefill.wait_until(lambda: prefill.load().num_running == 1, "the prompt to be computed")
    frozen.freeze()
    serve_next(other, prefill, at_rest=False)
    assert prefill.load().num_running == 1, "what is sent is under way"
    frozen.thaw()
    frozen.wait("a")
    prefill.wait_at_rest()


def test_what_a_frozen_peer_may_write_is_in_quarantine_after_a_cancel(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16, environment=SLOW)
    decode = start_engine("decode")
    decode.send(take(prefill, "a"))
    wait_sending(prefill)
    prefill.freeze()
    decode.abort("a")
    decode.wait("a", timeout_s=0.5)
    load = decode.load()
    assert (load.num_waiting, load.num_quarantined_pages, load.num_owned_pages) == (0, LONG // 4, LONG // 4)
    assert load.transfer.num_quarantined_pages == LONG // 4
    prefill.thaw()
    decode.wait_at_rest(timeout_s=2.0)
