"""The golden law where engines share the work unevenly: decode retracts, computes some prompts itself, or has nothing
to do.
"""

from __future__ import annotations

import pytest
from engines import request
from scenes import Start, expected, prompt_of
from toy_engine import EOS, NUM_KV_TOKENS, VOCAB

from diptych.core.batch import FinishReason
from diptych.engine.toy import next_token


def test_retraction_on_decode_changes_no_output(start_engine: Start) -> None:
    """More is to be decoded than the pool holds: some lose the pages that prefill has sent, and are computed again."""
    prefill, decode = start_engine("prefill", max_num_batched_tokens=64), start_engine("decode")
    length, max_tokens = 150, 250
    sent = [
        request(f"r{i}", prompt_of(length, i), prefill.address, max_tokens=max_tokens, ignore_eos=True)
        for i in range(NUM_KV_TOKENS // length)
    ]
    for each in sent:
        decode.send(each)
    for each in sent:
        decode.wait(each.request_id, timeout_s=60.0)
        assert decode.tokens(each.request_id) == expected(each)
    load = decode.load()
    assert load.retractions_total > 0 and load.transfer.rooms_done_total > 3
    prefill.wait_at_rest()
    decode.wait_at_rest()


def test_local_and_remote_prompts_in_one_batch(start_engine: Start) -> None:
    prefill = start_engine("prefill", max_num_batched_tokens=16)
    decode = start_engine("decode", max_num_batched_tokens=16, local_prefill_tokens=20)
    sent = []
    for index in range(24):
        length = (5, 60, 33)[index % 3]  # too short to ask for, asked for, and without a peer
        handoff = None if index % 3 == 2 else prefill.address
        each = request(f"r{index}", prompt_of(length + index, index), handoff, max_tokens=12, ignore_eos=True)
        decode.send(each)
        sent.append(each)
    for each in sent:
        decode.wait(each.request_id)
        assert decode.tokens(each.request_id) == expected(each)
    prefill.wait_at_rest()
    decode.wait_at_rest()
    assert decode.load().transfer.rooms_done_total == sum(5 + i > 20 for i in range(0, 24, 3)) + 8


@pytest.mark.parametrize("length", [2, 4, 30])
def test_an_end_of_sequence_that_comes_first_is_the_only_token(start_engine: Start, length: int) -> None:
    prefill, decode = start_engine("prefill"), start_engine("decode")
    start = (prompt_of(length - 1, start) for start in range(10 * VOCAB))
    prompts = ([*head, last] for head in start for last in range(VOCAB))
    prompt = next(prompt for prompt in prompts if next_token(prompt, VOCAB) == EOS[0])
    sent = request("a", prompt, prefill.address, max_tokens=50)
    decode.send(sent)
    decode.wait("a")
    assert decode.tokens("a") == [EOS[0]] and decode.reason("a") is FinishReason.STOP
    decode.wait_at_rest()
    prefill.wait_at_rest()
    assert decode.load().steps_total == 0, "decode has computed something"
