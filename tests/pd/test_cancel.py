"""Cancelled in every state: everything is free again within a second, and nobody else waits. And overload."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from engines import TOY_ENGINE, EngineUnderTest, request
from toy_engine import EOS, VOCAB

from diptych.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from diptych.core.batch import FinishReason
from diptych.core.request import HandTo, Request, TakeFrom
from diptych.engine.toy import expected_output

REST_S = 1.0
SLOW = {"TOY_STEP_S": "0.05"}
LONG = 400  # 25 steps of 16 tokens

Start = Callable[..., EngineUnderTest]
Pair = tuple[EngineUnderTest, EngineUnderTest]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """One pair for all that leaves it at rest."""
    prefill, decode = (
        EngineUnderTest(
            role,
            [sys.executable, str(TOY_ENGINE)],
            EngineConfig(
                transfer=TransferConfig(role=role),
                scheduler=SchedulerConfig(check_invariants=True, max_num_batched_tokens=16),
                cache=CacheConfig(page_size=4),
            ),
            SLOW,
        )
        for role in ("prefill", "decode")
    )
    yield prefill, decode
    prefill.close()
    decode.close()


# Every prompt is another one, lest it be found in a prefix cache.
PROMPTS = random.Random(1)


def prompt_of(length: int) -> list[int]:
    return [PROMPTS.randrange(VOCAB) for _ in range(length)]


def take(
    engine: EngineUnderTest, name: str, length: int = LONG, room: int | None = None, **sampling: object
) -> Request:
    handoff = TakeFrom(engine.address.address, engine.address.instance_id, room)
    return request(name, prompt_of(length), handoff, **({"max_tokens": 6, "ignore_eos": True} | sampling))


def check(decode: EngineUnderTest, sent: Request) -> None:
    assert decode.tokens(sent.request_id) == expected_output(sent, vocab_size=VOCAB, max_len=1024, eos_token_ids=EOS)


def at_rest(*engines: EngineUnderTest) -> None:
    deadline = time.monotonic() + REST_S
    for engine in engines:
        engine.wait_at_rest(timeout_s=max(0.05, deadline - time.monotonic()))


def serves_next(prefill: EngineUnderTest, decode: EngineUnderTest) -> None:
    sent = take(prefill, "next", 21)
    decode.send(sent)
    decode.wait("next", timeout_s=2.0)
    check(decode, sent)
    at_rest(prefill, decode)


def reach(state: str, prefill: EngineUnderTest, decode: EngineUnderTest, name: str) -> None:
    """Wait until the request is in this state."""
    match state:
        case "queued at prefill":
            prefill.wait_until(lambda: prefill.load().num_waiting >= 1, "it to be queued")
        case "loading":
            sent = prefill.load().transfer.bytes_sent_total
            prefill.wait_until(lambda: prefill.load().transfer.bytes_sent_total > sent, "its first pages to be sent")
        case "first token known":
            decode.wait_until(lambda: len(decode.tokens(name)) == 1, "its first token")
        case "running on decode":
            decode.wait_until(lambda: len(decode.tokens(name)) >= 3, "some tokens")


STATES = ["just sent", "queued at prefill", "loading", "first token known", "running on decode"]


@pytest.mark.parametrize("state", STATES)
def test_decode_drives_and_is_cancelled(pair: Pair, state: str) -> None:
    prefill, decode = pair
    if state == "queued at prefill":
        decode.send(take(prefill, "before"))
    decode.send(take(prefill, "a", max_tokens=300))
    reach(state, prefill, decode, "a")
    decode.abort("a")
    decode.wait("a", timeout_s=0.5)
    assert decode.reason("a") is FinishReason.ABORT
    if state == "queued at prefill":
        decode.abort("before")
    at_rest(decode, prefill)
    serves_next(prefill, decode)


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
@pytest.mark.parametrize("state", ["just sent", "loading", "first token known"])
def test_both_are_told_and_one_is_cancelled(pair: Pair, state: str, side: str) -> None:
    prefill, decode = pair
    room = PROMPTS.getrandbits(63)
    sent = take(prefill, "a", room=room)
    decode.send(sent)
    prefill.send(request("a", sent.prompt_token_ids, HandTo(room), max_tokens=6, ignore_eos=True))
    reach(state, prefill, decode, "a")
    for engine in [prefill] * (side != "decode") + [decode] * (side != "prefill"):
        engine.abort("a")
    prefill.wait("a", timeout_s=1.0)
    decode.wait("a", timeout_s=5.0)
    if side == "prefill":
        check(decode, sent)  # computed by decode itself, unless everything had been sent
    else:
        assert decode.reason("a") is FinishReason.ABORT
    at_rest(decode, prefill)
    serves_next(prefill, decode)


def test_a_room_that_nobody_else_enters_is_cancelled(pair: Pair) -> None:
    prefill, decode = pair
    decode.send(take(prefill, "lonely decode", room=7))
    prefill.send(request("lonely prefill", prompt_of(9), HandTo(8), max_tokens=6))
    prefill.wait_until(lambda: prefill.load().transfer.num_outgoing_rooms == 2, "both rooms")
    decode.abort("lonely decode")
    prefill.abort("lonely prefill")
    at_rest(decode, prefill)
    prefill.send(request("late", prompt_of(9), HandTo(7), max_tokens=6))
    prefill.wait("late")
    failure = prefill.failure("late")
    assert failure is not None and failure.kind == "RoomTaken"


def test_rooms_expire_on_both_sides(start_engine: Start) -> None:
    prefill = start_engine("prefill", room_timeout=0.5, transfer_timeout=1.0)
    decode = start_engine("decode", transfer_timeout=1.0)
    lonely = take(prefill, "a", 9, room=7)
    decode.send(lonely)
    prefill.send(request("b", prompt_of(9), HandTo(8), max_tokens=6))
    decode.wait("a", timeout_s=3.0)
    check(decode, lonely)
    prefill.wait("b", timeout_s=3.0)
    failure = prefill.failure("b")
    assert failure is not None and failure.kind == "TransferExpired"
    at_rest(decode, prefill)


def test_a_burst_of_cancelled_prompts_delays_nobody(pair: Pair) -> None:
    prefill, decode = pair
    names = [f"r{index}" for index in range(50)]
    for name in names:
        decode.send(take(prefill, name, 39))
    prefill.wait_until(lambda: prefill.load().num_waiting >= 20, "a queue")
    for name in names:
        decode.abort(name)
    started = time.monotonic()
    serves_next(prefill, decode)
    assert time.monotonic() - started < 1.0 + REST_S
    for name in names:
        decode.wait(name)
    took = decode.heard_at["next"][-1] - started
    assert took < 1.0, f"{took:.2f} s"


def test_few_rooms_serve_many(start_engine: Start) -> None:
    prefill, decode = start_engine("prefill", max_rooms=2), start_engine("decode", max_rooms=2)
    other = start_engine("decode", max_rooms=2)
    sent = [take(prefill, f"r{index}", 9 + index) for index in range(20)]
    for index, each in enumerate(sent):
        (decode, other)[index % 2].send(each)
    for index, each in enumerate(sent):
        (decode, other)[index % 2].wait(each.request_id)
        check((decode, other)[index % 2], each)
    at_rest(prefill, decode, other)
    # How many find a room rather than compute here is a matter of timing; at least who comes first does.
    assert decode.load().transfer.rooms_done_total + other.load().transfer.rooms_done_total >= 2
    assert prefill.load().transfer.num_free_rooms == 2


@pytest.mark.parametrize("local", [True, False])
def test_a_full_queue_at_prefill(start_engine: Start, local: bool) -> None:
    prefill = start_engine(
        "prefill", max_num_seqs=1, max_queued_requests=2, max_num_batched_tokens=16, environment={"TOY_STEP_S": "0.02"}
    )
    decode = start_engine("decode", local_prefill=local)
    sent = [take(prefill, f"r{index}", 100) for index in range(15)]
    for each in sent:
        decode.send(each)
    refused = 0
    for each in sent:
        decode.wait(each.request_id)
        failure = decode.failure(each.request_id)
        if failure is None:
            check(decode, each)
        else:
            assert not local and failure.kind == "Overloaded" and "waiting already" in failure.message
            refused += 1
    assert (refused == 0) if local else (1 <= refused < 15)
    at_rest(prefill, decode)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_that_ends_in_decodes_queue_does_not_wait_at_prefill(start_engine: Start, first: str) -> None:
    """Its room was never opened, and prefill must not wait until the time of that is up."""
    prefill, decode = start_engine("prefill"), start_engine("decode", max_num_seqs=1)
    decode.send(request("before", prompt_of(100), None, max_tokens=800, ignore_eos=True))
    decode.wait_until(lambda: len(decode.tokens("before")) > 0, "the seat to be taken")
    room = PROMPTS.getrandbits(63)
    sent = take(prefill, "a", 30, room=room)
    told = request("a", sent.prompt_token_ids, HandTo(room), max_tokens=6, ignore_eos=True)
    decode.send(sent)
    if first == "prefill":
        prefill.send(told)
        prefill.wait_until(lambda: len(prefill.tokens("a")) == 1, "its first token")
    decode.abort("a")
    decode.wait("a", timeout_s=0.5)
    if first == "decode":
        prefill.wait_until(lambda: prefill.load().transfer.num_peers == 1, "the news")
        prefill.send(told)
    prefill.wait("a", timeout_s=1.0)
    at_rest(prefill)
    decode.abort("before")
    at_rest(decode)
