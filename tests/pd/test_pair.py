"""A prefill and a decode engine: real processes, ZMQ, NIXL; the toy model shows every byte that is wrong."""

from __future__ import annotations

import random

import pytest
from engines import EngineUnderTest, request
from toy_engine import EOS, VOCAB

from diptych.core.batch import FinishReason
from diptych.core.request import HandTo, Request, TakeFrom
from diptych.engine.toy import expected_output


def expected(sent: Request) -> list[int]:
    return expected_output(sent, vocab_size=VOCAB, max_len=1024, eos_token_ids=EOS)


@pytest.fixture
def pair(start_engine) -> tuple[EngineUnderTest, EngineUnderTest]:
    return start_engine("prefill", max_num_batched_tokens=16), start_engine("decode")


def prompt_of(length: int, start: int = 11) -> list[int]:
    return [(start + 3 * i) % VOCAB for i in range(length)]


def test_decode_drives(pair) -> None:
    prefill, decode = pair
    sent = []
    for length in [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100]:
        sent.append(request(f"r{length}", prompt_of(length, length), prefill.address, max_tokens=9, ignore_eos=True))
        decode.send(sent[-1])
    for each in sent:
        decode.wait(each.request_id)
        assert decode.tokens(each.request_id) == expected(each)
        assert decode.reason(each.request_id) is FinishReason.LENGTH
    prefill.wait_at_rest()
    decode.wait_at_rest()
    load = decode.load().transfer
    assert load.rooms_done_total == len(sent) and not load.failures_total
    assert prefill.load().transfer.bytes_sent_total > 0


def test_both_told_in_any_order(pair) -> None:
    prefill, decode = pair
    rng = random.Random(1)
    sent = []
    for index in range(10):
        room = rng.getrandbits(63)
        take = TakeFrom(prefill.address.address, prefill.address.instance_id, room)
        mine = request(f"d{index}", prompt_of(5 + 3 * index, index), take, max_tokens=6, ignore_eos=True)
        theirs = request(f"p{index}", mine.prompt_token_ids, HandTo(room), max_tokens=6, ignore_eos=True)
        for engine, each in sorted([(decode, mine), (prefill, theirs)], key=lambda _: rng.random()):
            engine.send(each)
        sent.append((mine, theirs))
    for mine, theirs in sent:
        decode.wait(mine.request_id)
        prefill.wait(theirs.request_id)
        assert decode.tokens(mine.request_id) == expected(mine)
        assert prefill.tokens(theirs.request_id) == expected(mine)[:1]
        assert prefill.reason(theirs.request_id) is FinishReason.LENGTH
    prefill.wait_at_rest()
    decode.wait_at_rest()


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (16, 16)])
def test_unequal_page_sizes(start_engine, sizes: tuple[int, int]) -> None:
    prefill = start_engine("prefill", page_size=sizes[0], max_num_batched_tokens=16)
    decode = start_engine("decode", page_size=sizes[1])
    for length in [1, 7, 8, 9, 40, 41]:
        each = request(f"r{length}", prompt_of(length, length), prefill.address, max_tokens=5, ignore_eos=True)
        decode.send(each)
        decode.wait(each.request_id)
        assert decode.tokens(each.request_id) == expected(each)
    assert decode.load().transfer.rooms_done_total == 6


def test_a_second_turn_sends_only_new_pages(pair) -> None:
    prefill, decode = pair
    first = request("a", prompt_of(64), prefill.address, max_tokens=8, ignore_eos=True)
    decode.send(first)
    decode.wait("a")
    before = prefill.load().transfer.bytes_sent_total
    second = request("b", [*prompt_of(64), *expected(first), 1, 2, 3], prefill.address, max_tokens=4, ignore_eos=True)
    decode.send(second)
    decode.wait("b")
    assert decode.tokens("b") == expected(second)
    handoff_nbytes = 3 * 64 + 2 * 512 + 64
    assert prefill.load().transfer.bytes_sent_total - before <= 2 * 32 + handoff_nbytes


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"max_tokens": 50, "stop_token_ids": tuple(range(50))}])
def test_the_first_token_may_be_the_last(pair, sampling) -> None:
    prefill, decode = pair
    each = request("a", prompt_of(20), prefill.address, **sampling)
    decode.send(each)
    decode.wait("a")
    assert decode.tokens("a") == expected(each) and len(decode.tokens("a")) == 1
    prefill.wait_at_rest()
    decode.wait_at_rest()
    assert decode.load().steps_total == 0


def test_a_mismatch_is_refused_with_both_values(start_engine, capfd) -> None:
    prefill = start_engine("prefill", environment={"TOY_FINGERPRINT": "other"})
    decode = start_engine("decode", local_prefill=False)
    decode.send(request("a", prompt_of(20), prefill.address, max_tokens=4))
    decode.wait("a")
    failure = decode.failure("a")
    assert failure.kind == "PeerIncompatible" and "toy" in failure.message and "other" in failure.message
    prefill.wait_at_rest()
    decode.wait_at_rest()


def test_each_side_logs_the_stages_of_a_room(start_engine, capfd) -> None:
    prefill, decode = start_engine("prefill", max_num_batched_tokens=16), start_engine("decode")
    sent = request("told", prompt_of(40), prefill.address, max_tokens=3, ignore_eos=True)
    decode.send(sent)
    decode.wait("told")
    decode.wait_at_rest()
    prefill.wait_at_rest()
    lines = [line for line in capfd.readouterr().err.splitlines() if " over: " in line]
    (handed,) = [line for line in lines if "handed over: " in line]
    (taken,) = [line for line in lines if "taken over: " in line]
    fields = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in (handed, taken)]
    assert fields[0]["room"] == fields[1]["room"] and fields[0]["outcome"] == fields[1]["outcome"] == "done"
    assert fields[1]["request_id"] == "told" and fields[0]["request_id"].endswith("/told")
    times = {"room_wait_ms", "first_write_ms", "first_token_ms", "transfer_ms", "total_ms"}
    assert fields[0].keys() >= times | {"bytes", "descriptors", "gb_s"} and fields[1].keys() >= times | {"queue_ms"}
    assert all(0.0 <= float(fields[side][name]) < 30_000 for side in (0, 1) for name in times)
