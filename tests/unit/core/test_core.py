"""Requests, sequences, messages and the channel that carries them."""

from __future__ import annotations

import math

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from diptych.core.batch import Admission, Batch, FinishReason, RowOutput, SequenceStep, StepOutput, TokenLogprobs
from diptych.core.channel import Channel, Codec, open_socket
from diptych.core.messages import (
    AbortRequests,
    AddRequest,
    Fatal,
    FromEngine,
    RequestFailed,
    RequestOutput,
    RequestOutputs,
    ToEngine,
)
from diptych.core.request import Grammar, GrammarKind, HandTo, Request, SamplingParams, TakeFrom
from diptych.core.sequence import TRANSITIONS, Sequence, SequenceState
from diptych.errors import InvariantError, PromptTooLong, RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 1000),
        ("prompt_logprobs", -1),
        ("seed", 2**64),
        ("stop", ("",)),
    ],
)
def test_bad_sampling_names_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field and field in str(refused.value)


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(RequestError, match="must not exceed"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(("params", "greedy"), [({"temperature": 0.0}, True), ({"top_k": 1}, True), ({}, False)])
def test_is_greedy(params: dict[str, float], greedy: bool) -> None:
    assert SamplingParams(**params).is_greedy is greedy


def sequence() -> Sequence:
    return Sequence(Request(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams()), [1, 2, 3], 10)


@pytest.mark.parametrize("source", SequenceState)
@pytest.mark.parametrize("target", SequenceState)
def test_every_transition_is_listed_or_a_bug(source: SequenceState, target: SequenceState) -> None:
    subject = sequence()
    subject.state = source
    if target in TRANSITIONS[source]:
        subject.move_to(target)
        assert subject.state is target
    else:
        with pytest.raises(InvariantError, match="is not a transition"):
            subject.move_to(target)


def test_progress_is_counters() -> None:
    subject = sequence()
    assert (subject.num_uncomputed_tokens, subject.num_output_tokens) == (3, 0)
    subject.num_computed_tokens, subject.num_pending_tokens = 3, 1
    assert (subject.num_uncomputed_tokens, subject.num_tokens) == (1, 4)
    subject.num_pending_tokens = 0
    subject.token_ids.append(9)
    assert (subject.num_uncomputed_tokens, subject.num_output_tokens) == (1, 1)


MESSAGES = [
    AddRequest(
        Request(
            request_id="r",
            prompt_token_ids=[1, 2],
            sampling=SamplingParams(logit_bias={3: -1.0}, stop=("x",), grammar=Grammar(GrammarKind.REGEX, "a+")),
            handoff=TakeFrom("127.0.0.1:1", "i", 5),
        )
    ),
    AddRequest(Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(), handoff=HandTo(2**63 - 1))),
    AbortRequests(None),
]
ANSWERS = [
    RequestOutputs([RequestOutput("r", [1], FinishReason.STOP, 1, 2, [TokenLogprobs(1, -0.5, 1, [(1, -0.5)])])]),
    RequestFailed.of("r", PromptTooLong("too long", "prompt")),
    Fatal("broken"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_requests_survive_the_wire(message: ToEngine) -> None:
    codec: Codec[ToEngine, ToEngine] = Codec(ToEngine)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: type(message).__name__)
def test_answers_survive_the_wire(message: FromEngine) -> None:
    codec: Codec[FromEngine, FromEngine] = Codec(FromEngine)
    assert codec.decode(codec.encode(message)) == message


def test_batches_survive_the_wire() -> None:
    batch = Batch(1, [0], [Admission(0, "r", [1], 1, SamplingParams(), (1,), 4)], [SequenceStep(0, 0, 1, [7], True)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch) == batch
    output = StepOutput(1, [RowOutput([3])], 0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput) == output
    assert batch.num_tokens == 1


@given(st.binary(max_size=200))
def test_a_codec_never_raises(frame: bytes) -> None:
    codec: Codec[ToEngine, ToEngine] = Codec(ToEngine)
    before = codec.num_dropped
    assert codec.decode(frame) is not None or codec.num_dropped == before + 1


def test_a_truncated_message_and_a_bad_value_are_dropped() -> None:
    codec: Codec[ToEngine, ToEngine] = Codec(ToEngine)
    good = codec.encode(MESSAGES[0])
    assert codec.decode(good[:-1]) is None
    worse = msgspec.msgpack.decode(good)
    worse["request"]["sampling"]["top_p"] = 7.0
    assert codec.decode(msgspec.msgpack.encode(worse)) is None and codec.num_dropped == 2


def test_a_channel_keeps_order_and_drops_what_is_foreign() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours: Channel[ToEngine, FromEngine] = Channel(open_socket(context, "inproc://x", bind=True), FromEngine)
    theirs: Channel[FromEngine, ToEngine] = Channel(open_socket(context, "inproc://x", bind=False), ToEngine)
    for message in MESSAGES:
        ours.send(message)
    ours.socket.send(b"junk")
    assert theirs.receive_all() == MESSAGES
    assert theirs.receive_all() == [] and theirs.codec.num_dropped == 1
    ours.close()
    theirs.close()
    context.term()
