"""Weights that change under a prefill and a decode engine: no prompt of one's is ever continued as another's.

Real processes, ZMQ, NIXL; the salted toy shows pages of other weights in its tokens.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engines import EngineUnderTest, request
from toy_engine import VOCAB

from diptych.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from diptych.core.batch import FinishReason
from diptych.core.calls import StageCheckpoint
from diptych.core.messages import InFlight, ReleaseMemory, ResumeMemory, SetWeightVersion, UpdateWeights
from diptych.core.request import Request
from diptych.engine.salted import salted_output

SALTED_ENGINE = Path(__file__).with_name("salted_engine.py")


@pytest.fixture
def start() -> Iterator[Callable[..., EngineUnderTest]]:
    engines: list[EngineUnderTest] = []

    def start(role: str, **options: object) -> EngineUnderTest:
        config = replace(
            EngineConfig(),
            transfer=TransferConfig(role=role, **options),
            scheduler=SchedulerConfig(check_invariants=True, max_num_batched_tokens=16),
            cache=CacheConfig(page_size=4),
        )
        engine = EngineUnderTest(role, [sys.executable, str(SALTED_ENGINE)], config, {})
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def pair(start: Callable[..., EngineUnderTest]) -> tuple[EngineUnderTest, EngineUnderTest]:
    return start("prefill"), start("decode")


def expected(each: Request, salt: int) -> list[int]:
    return salted_output(each, salt, vocab_size=VOCAB)


def prompt_of(length: int, start: int = 11) -> list[int]:
    return [(start + 3 * index) % VOCAB for index in range(length)]


def asked(name: str, prefill: EngineUnderTest, length: int = 21, start: int = 11) -> Request:
    return request(name, prompt_of(length, start), prefill.address, max_tokens=9, ignore_eos=True)


def update(engine: EngineUnderTest, salt: int, in_flight: InFlight = "wait", version: str | None = None) -> None:
    reply = engine.ask(lambda call_id: UpdateWeights(call_id, "u", in_flight, StageCheckpoint("u", str(salt)), version))
    assert reply.ok, reply


def served(decode: EngineUnderTest, each: Request) -> list[int]:
    decode.send(each)
    decode.wait(each.request_id)
    return decode.tokens(each.request_id)


def bytes_sent(engine: EngineUnderTest) -> int:
    return engine.load().transfer.bytes_sent_total


def test_pages_move_only_while_both_have_the_same_weights(pair) -> None:
    prefill, decode = pair
    first = asked("first", prefill)
    assert served(decode, first) == expected(first, 0) and bytes_sent(prefill) > 0
    update(prefill, 5, version="five")
    alone = asked("alone", prefill, start=17)
    assert served(decode, alone) == expected(alone, 0)  # computed by decode itself
    assert bytes_sent(prefill) == 0
    update(decode, 5, version="five")
    again = asked("again", prefill, start=23)
    assert served(decode, again) == expected(again, 5) and bytes_sent(prefill) > 0
    prefill.wait_at_rest()
    decode.wait_at_rest()


def test_a_refusal_names_both_values(start: Callable[..., EngineUnderTest]) -> None:
    prefill, decode = start("prefill"), start("decode", local_prefill=False)
    update(prefill, 5, version="five")
    decode.send(asked("a", prefill))
    decode.wait("a")
    failure = decode.failure("a")
    assert failure is not None and failure.kind == "PeerIncompatible"
    assert "salt-5 here and toy there" in failure.message and "five here and default there" in failure.message


def test_a_version_alone_keeps_engines_apart(pair) -> None:
    prefill, decode = pair
    assert prefill.ask(lambda call_id: SetWeightVersion(call_id, "step-2")).ok
    each = asked("a", prefill)
    assert served(decode, each) == expected(each, 0) and bytes_sent(prefill) == 0
    assert decode.ask(lambda call_id: SetWeightVersion(call_id, "step-2")).ok
    each = asked("b", prefill, start=3)
    assert served(decode, each) == expected(each, 0) and bytes_sent(prefill) > 0


def test_an_engine_that_sleeps_is_gone_for_its_peers(pair) -> None:
    prefill, decode = pair
    first = asked("first", prefill)
    assert served(decode, first) == expected(first, 0)
    old = prefill.address
    assert prefill.ask(lambda call_id: ReleaseMemory(call_id, ["kv_cache"], "wait")).ok
    for index in range(3):
        alone = request(f"alone{index}", prompt_of(9 + index, index), old, max_tokens=9, ignore_eos=True)
        assert served(decode, alone) == expected(alone, 0)
    assert decode.ask(lambda call_id: ReleaseMemory(call_id, ["kv_cache", "weights"], "wait")).ok
    each = request("asleep", prompt_of(21), old, max_tokens=9, ignore_eos=True)
    decode.send(each)
    decode.wait("asleep")
    failure = decode.failure("asleep")
    assert failure is not None and failure.kind == "Unavailable" and "resume_memory_occupation" in failure.message
    for engine in pair:
        assert engine.ask(lambda call_id: ResumeMemory(call_id, ["kv_cache", "weights"])).ok
    each = asked("awake", prefill, start=29)
    assert served(decode, each) == expected(each, 0) and bytes_sent(prefill) > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_updates_under_load_mix_nothing_and_lose_nothing(pair, seed: int) -> None:
    """Both engines get each update, at different moments; every output is of one of the weights, all of it."""
    prefill, decode = pair
    rng = random.Random(seed)
    sent: list[Request] = []
    salts = [0]
    for round_ in range(6):
        for index in range(8):
            each = asked(f"{round_}-{index}", prefill, rng.choice((3, 9, 21, 60)), rng.randrange(50))
            decode.send(each)
            sent.append(each)
            decode.listen(rng.choice((0, 5, 20)))
        if round_ % 2:
            salts.append(round_)
            for engine in rng.sample(pair, 2):
                update(engine, round_, rng.choice(("wait", "abort", "wait")), f"v{round_}")
        else:
            engine = rng.choice(pair)
            assert engine.ask(lambda call_id: ReleaseMemory(call_id, ["kv_cache"], "wait")).ok
            assert engine.ask(lambda call_id: ResumeMemory(call_id, ["kv_cache"])).ok
    for each in sent:
        decode.wait(each.request_id, 60)
        if decode.reason(each.request_id) is FinishReason.LENGTH:
            assert decode.tokens(each.request_id) in [expected(each, salt) for salt in salts], each.request_id
        else:
            failure = decode.failure(each.request_id)
            assert failure is None or failure.kind == "Unavailable"
    prefill.wait_at_rest(40)
    decode.wait_at_rest(40)
    last = asked("last", prefill, start=31)
    assert served(decode, last) == expected(last, salts[-1]) and bytes_sent(prefill) > 0
