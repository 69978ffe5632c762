"""Weights replaced, memory released and requests paused while an engine serves: no page and no request is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import msgspec
import pytest

from diptych.core.batch import FinishReason
from diptych.core.calls import StageCheckpoint, StageWeights, TensorBytes
from diptych.core.messages import (
    AbortRequests,
    AddRequest,
    CallWorkers,
    Changed,
    ContinueGeneration,
    Drain,
    FlushCache,
    GetLoad,
    InFlight,
    PauseGeneration,
    Ready,
    ReleaseMemory,
    Reply,
    RequestFailed,
    RequestOutputs,
    ResumeMemory,
    SetWeightVersion,
    Stopped,
    UpdateWeights,
)
from diptych.core.request import Request, SamplingParams
from diptych.engine.salted import SaltedExecutor, salted_output

from .test_engine import INFO, Harness, request

VOCAB = 50
LONG = {"max_tokens": 100, "ignore_eos": True}


def expected(each: Request, salt: int) -> list[int]:
    return salted_output(each, salt, vocab_size=VOCAB)


def continued(each: Request, said: list[int], salt: int) -> list[int]:
    return salted_output(each, salt, vocab_size=VOCAB, said=said)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness(SaltedExecutor(INFO))
    harness.wait_for(Ready)
    yield harness
    harness.close()


def update(call_id: int, salt: object, in_flight: InFlight = "wait", version: str | None = None) -> UpdateWeights:
    update_id = f"u{call_id}"
    return UpdateWeights(call_id, update_id, in_flight, StageCheckpoint(update_id, str(salt)), version)


def replied(harness: Harness, call_id: int) -> Reply:
    while True:
        found = [reply for reply in harness.wait_for(Reply) if reply.call_id == call_id]
        if found:
            return found[0]
        harness.channel.socket.poll(20)
        harness.messages += harness.channel.receive_all()


def end_or_failure(harness: Harness, request_id: str) -> tuple[list[int], FinishReason | None]:
    while not any(isinstance(m, RequestFailed) and m.request_id == request_id for m in harness.messages):
        try:
            return harness.wait_for_end(request_id, timeout_s=0.05)
        except AssertionError:
            assert harness.thread.is_alive()
    return [], None


def outputs(harness: Harness, request_id: str) -> list[int]:
    messages = [message for message in harness.messages if isinstance(message, RequestOutputs)]
    return [t for message in messages for o in message.outputs if o.request_id == request_id for t in o.token_ids]


def wait_for_tokens(harness: Harness, request_id: str) -> None:
    """Until a request has said something: a load report alone is a `RequestOutputs`, too."""
    deadline = time.monotonic() + 20.0
    while not outputs(harness, request_id):
        assert time.monotonic() < deadline, f"{request_id} says nothing"
        harness.messages += harness.channel.receive_all()
        harness.channel.socket.poll(20)


def served(harness: Harness, each: Request) -> list[int]:
    harness.channel.send(AddRequest(each))
    return harness.wait_for_end(each.request_id)[0]


def test_wait_finishes_with_the_old_weights_and_what_comes_later_has_the_new(harness: Harness) -> None:
    before, later = request("before", **LONG), request("later", **LONG)
    harness.channel.send(AddRequest(before))
    wait_for_tokens(harness, "before")
    harness.channel.send(CallWorkers(9, StageWeights("u", [TensorBytes("salt", "int8", (1,), b"\3")])))
    assert replied(harness, 9).ok
    harness.channel.send(UpdateWeights(1, "u", "wait", weight_version="v3"))
    harness.channel.send(AddRequest(later))
    assert harness.wait_for_end("before")[0] == expected(before, 0)
    assert harness.wait_for_end("later")[0] == expected(later, 3)
    reply = replied(harness, 1)
    assert reply.ok and msgspec.msgpack.decode(reply.value) <= 1
    info = harness.wait_for(Changed)[-1].info
    assert (info.weight_version, info.fingerprint) == ("v3", "salt-3")


def test_abort_ends_what_runs(harness: Harness) -> None:
    harness.channel.send(AddRequest(request("a", **LONG)))
    harness.channel.send(update(1, 3, "abort"))
    assert harness.wait_for_end("a")[1] in (FinishReason.ABORT, FinishReason.LENGTH)
    each = request("b", **LONG)
    assert served(harness, each) == expected(each, 3)


def test_retract_computes_again_what_was_said(harness: Harness) -> None:
    each = request("a", **LONG)
    harness.channel.send(AddRequest(each))
    wait_for_tokens(harness, "a")
    harness.channel.send(update(1, 3, "retract"))
    tokens, _ = harness.wait_for_end("a")
    old = expected(each, 0)
    said = next(n for n in range(101) if n == 100 or tokens[n] != old[n])
    assert tokens in [continued(each, old[:count], 3) for count in range(1, said + 1)]


def test_keep_goes_on_and_its_pages_are_no_others(harness: Harness) -> None:
    harness.channel.send(AddRequest(request("a", **LONG)))
    wait_for_tokens(harness, "a")
    harness.channel.send(update(1, 3, "keep"))
    assert harness.wait_for_end("a")[1] is FinishReason.LENGTH
    # The same prompt: pages of "a" were written in part under the old weights, and must not be found.
    each = request("b", **LONG)
    assert served(harness, each) == expected(each, 3)
    assert served(harness, msgspec.structs.replace(each, request_id="c")) == expected(each, 3)


@pytest.mark.parametrize("in_flight", ["wait", "abort", "keep", "retract"])
def test_what_was_cached_is_not_found(harness: Harness, in_flight: InFlight) -> None:
    each = request("a", **LONG)
    assert served(harness, each) == expected(each, 0)
    harness.channel.send(update(1, 3, in_flight))
    assert replied(harness, 1).ok
    assert served(harness, msgspec.structs.replace(each, request_id="b")) == expected(each, 3)


def test_a_refused_update_changes_nothing(harness: Harness) -> None:
    each = request("a", **LONG)
    assert served(harness, each) == expected(each, 0)
    harness.channel.send(update(1, "none", "abort"))
    harness.channel.send(UpdateWeights(2, "unknown", "abort"))
    assert "cannot take" in replied(harness, 1).message and replied(harness, 1).error_kind == "RequestError"
    assert "nothing is staged" in replied(harness, 2).message
    assert served(harness, msgspec.structs.replace(each, request_id="b")) == expected(each, 0)
    assert not any(isinstance(message, Changed) for message in harness.messages)


def test_tensors_are_staged_then_committed(harness: Harness) -> None:
    harness.channel.send(CallWorkers(1, StageWeights("u", [TensorBytes("salt", "int8", (1,), b"\5")])))
    harness.channel.send(UpdateWeights(2, "u", "wait"))
    assert replied(harness, 2).ok
    each = request("a", **LONG)
    assert served(harness, each) == expected(each, 5)


def test_versions_may_be_named_later(harness: Harness) -> None:
    harness.channel.send(SetWeightVersion(1, "nine"))
    assert replied(harness, 1).ok and harness.wait_for(Changed)[-1].info.weight_version == "nine"


def test_a_pause_in_place_and_an_update_in_it(harness: Harness) -> None:
    each = request("a", **LONG)
    harness.channel.send(AddRequest(each))
    wait_for_tokens(harness, "a")
    harness.channel.send(PauseGeneration(1, "retract"))
    assert replied(harness, 1).ok
    said = outputs(harness, "a")
    harness.channel.send(AddRequest(request("held", max_tokens=2, ignore_eos=True)))
    harness.channel.send(AddRequest(request("gone", max_tokens=2, ignore_eos=True)))
    harness.channel.send(AbortRequests(["gone"]))
    assert harness.wait_for_end("gone") == ([], FinishReason.ABORT)
    harness.channel.send(update(2, 4))
    assert replied(harness, 2).ok and outputs(harness, "a") == said
    harness.channel.send(ContinueGeneration(3))
    assert harness.wait_for_end("a")[0] == continued(each, said, 4)
    assert harness.wait_for_end("held")[1] is FinishReason.LENGTH


def test_released_memory_is_not_touched_and_requests_hear_why(harness: Harness) -> None:
    each = request("a", **LONG)
    assert served(harness, each) == expected(each, 0)
    harness.channel.send(ReleaseMemory(1, ["kv_cache", "weights"], "wait"))
    assert replied(harness, 1).ok and set(harness.wait_for(Changed)[-1].info.released) == {"kv_cache", "weights"}
    harness.channel.send(AddRequest(request("early", **LONG)))
    (failed,) = harness.wait_for(RequestFailed)
    assert failed.kind == "Unavailable" and "resume_memory_occupation" in failed.message
    harness.channel.send(update(2, 3))
    assert replied(harness, 2).error_kind == "Unavailable"
    harness.channel.send(ResumeMemory(3, ["weights"]))
    assert replied(harness, 3).ok
    harness.channel.send(AddRequest(request("still", **LONG)))
    assert "kv_cache released" in harness.wait_for(RequestFailed, 2)[1].message
    harness.channel.send(update(4, 3))
    harness.channel.send(ResumeMemory(5, ["kv_cache", "weights"]))
    assert replied(harness, 4).ok and replied(harness, 5).ok
    assert served(harness, msgspec.structs.replace(each, request_id="b")) == expected(each, 3)


def test_a_drain_ends_a_pause(harness: Harness) -> None:
    each = request("a", **LONG)
    harness.channel.send(AddRequest(each))
    harness.channel.send(PauseGeneration(1, "keep"))
    harness.channel.send(AddRequest(request("held", **LONG)))
    assert replied(harness, 1).ok
    harness.channel.send(Drain(5.0))
    assert harness.wait_for_end("a")[0] == expected(each, 0)
    assert harness.wait_for_end("held")[0] == expected(each, 0)
    harness.wait_for(Stopped)


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_upkeep_loses_nothing(harness: Harness, seed: int) -> None:
    """Every request is answered, every output is of weights that were in force, and the books balance at the end."""
    rng = random.Random(seed)
    asked: dict[str, Request] = {}
    salts = [0]
    for round_ in range(60):
        for index in range(3):
            name = f"{round_}-{index}"
            prompt = [rng.randrange(50) for _ in range(rng.choice((5, 9, 30)))] if rng.random() < 0.5 else [1] * 20
            sampling = SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=True)
            asked[name] = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
            harness.channel.send(AddRequest(asked[name]))
        kind = rng.randrange(4)
        if kind == 0:
            salts.append(round_ + 1)
            harness.channel.send(update(1000 + round_, salts[-1], rng.choice(("wait", "abort", "wait"))))
        elif kind == 1:
            harness.channel.send(ReleaseMemory(2000 + round_, ["kv_cache"], rng.choice(("wait", "abort"))))
            harness.channel.send(ResumeMemory(3000 + round_, ["kv_cache", "weights"]))
        elif kind == 2:
            harness.channel.send(PauseGeneration(4000 + round_, rng.choice(("wait", "abort", "retract", "keep"))))
            harness.channel.send(ContinueGeneration(5000 + round_))
    unanswered = set(asked)
    while unanswered:
        name = unanswered.pop()
        tokens, reason = end_or_failure(harness, name)
        if reason is FinishReason.LENGTH:
            assert tokens in [expected(asked[name], salt) for salt in salts], name
    harness.channel.send(GetLoad(1))
    load = replied(harness, 1).load
    assert load is not None and load.num_owned_pages == 0 and load.num_free_slots == load.num_slots
    harness.channel.send(FlushCache(2))
    assert replied(harness, 2).ok
