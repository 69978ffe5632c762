"""Control messages: pinned byte by byte, and any bytes at all."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.batch import FinishReason, TokenLogprobs
from diptych.kv.layout import KVLayout
from diptych.transfer.control import (
    CONTROL_GUARD,
    Cancel,
    Control,
    ControlMessage,
    Failed,
    FirstToken,
    Heartbeat,
    Hello,
    HelloReply,
    Joined,
    Leaving,
    PeerLoad,
    Quiesced,
    decode_control,
    encode_control,
)
from diptych.transfer.extension import ForeignFrame, LayoutFields, OtherVersion, PeerExtension

PEER = PeerExtension(
    instance_id="i",
    layout=LayoutFields.of(KVLayout.single_rank(1, 1, head_dim=1, page_size=1, dtype="float32"), 1),
    model_layers=1,
    model_kv_heads=1,
    model_fingerprint="m",
)
PEER_BYTES = msgspec.msgpack.encode(PEER)
# ["diptych", 1, ["i", {...}]]
HEAD = b"\x93\xa7diptych\x01\x92\xa1i"
ROOM = b"\xa4room\x07"
GOLDEN: list[tuple[ControlMessage, bytes]] = [
    (Hello(PEER, 9), b"\x83\xa4type\xa5Hello\xa8identity" + PEER_BYTES + b"\xa5nonce\x09"),
    (
        HelloReply(PEER, "no", 9),
        b"\x84\xa4type\xaaHelloReply\xa8identity" + PEER_BYTES + b"\xa7refusal\xa2no\xa5nonce\x09",
    ),
    (Joined(7, 2), b"\x83\xa4type\xa6Joined" + ROOM + b"\xaageneration\x02"),
    (
        FirstToken(room=7, token_id=300, cached_tokens=16),
        b"\x84\xa4type\xaaFirstToken" + ROOM + b"\xa8token_id\xcd\x01\x2c\xadcached_tokens\x10",
    ),
    (
        FirstToken(
            room=7,
            generation=1,
            token_id=3,
            logprobs=TokenLogprobs(3, -0.5, 1, [(3, -0.5)], [(9, -2.0)]),
            prompt_logprobs=[TokenLogprobs(1, -1.0, 2, [])],
            finish_reason=FinishReason.STOP,
            matched_stop=3,
        ),
        b"\x88\xa4type\xaaFirstToken" + ROOM + b"\xaageneration\x01\xa8token_id\x03"
        b"\xa8logprobs\x95\x03\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\x01"
        b"\x91\x92\x03\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\x91\x92\x09\xcb\xc0\x00\x00\x00\x00\x00\x00\x00"
        b"\xafprompt_logprobs\x91\x95\x01\xcb\xbf\xf0\x00\x00\x00\x00\x00\x00\x02\x90\x90"
        b"\xadfinish_reason\xa4stop\xacmatched_stop\x03",
    ),
    (
        Failed(room=7, kind="Overloaded", message="full", has_posted=True),
        b"\x85\xa4type\xa6Failed" + ROOM + b"\xa4kind\xaaOverloaded\xa7message\xa4full\xaahas_posted\xc3",
    ),
    (Quiesced(7), b"\x83\xa4type\xa8Quiesced" + ROOM + b"\xaageneration\x00"),
    (Cancel(7, 2), b"\x83\xa4type\xa6Cancel" + ROOM + b"\xaageneration\x02"),
    (
        Heartbeat(sequence=5, seen=4, load=PeerLoad(num_free_rooms=2)),
        b"\x84\xa4type\xa9Heartbeat\xa8sequence\x05\xa4seen\x04\xa4load\x81\xaenum_free_rooms\x02",
    ),
    (Heartbeat(sequence=1), b"\x82\xa4type\xa9Heartbeat\xa8sequence\x01"),
    (Leaving(1.0), b"\x82\xa4type\xa7Leaving\xa9timeout_s\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"),
]


@pytest.mark.parametrize("message,body", GOLDEN, ids=lambda value: type(value).__name__)
def test_messages_are_pinned(message: ControlMessage, body: bytes) -> None:
    frames = encode_control(message, "i")
    assert frames == [b"DiptychPeer", HEAD + body]
    assert decode_control(frames) == Control("i", message)


def test_every_message_is_pinned() -> None:
    assert {type(message) for message, _ in GOLDEN} == set(ControlMessage.__args__)


def test_another_version_is_reported() -> None:
    assert decode_control([CONTROL_GUARD, b"\x93\xa7diptych\x02\xc0"]) == OtherVersion(2)


@pytest.mark.parametrize(
    "frames,reason",
    [
        ([], "guard"),
        ([b"NixlMsgGuard", HEAD], "guard"),
        ([CONTROL_GUARD], "count"),
        ([CONTROL_GUARD, HEAD, b""], "count"),
        ([CONTROL_GUARD, b""], "extension"),
        ([CONTROL_GUARD, pickle.dumps(3)], "extension"),
        ([CONTROL_GUARD, HEAD], "extension"),
        ([CONTROL_GUARD, HEAD + b"\x81\xa4type\xa5Other"], "extension"),
        ([CONTROL_GUARD, HEAD + b"\x82\xa4type\xa6Cancel\xa4room\xff"], "extension"),
        ([CONTROL_GUARD, HEAD + b"\x82\xa4type\xa7Leaving\xa9timeout_s\xcb\xbf\xf0\0\0\0\0\0\0"], "extension"),
        ([CONTROL_GUARD, HEAD + b"\x82\xa4type\xa7Leaving\xa9timeout_s\xcb\x7f\xf8\0\0\0\0\0\0"], "extension"),
        ([CONTROL_GUARD, b"\x00" * (32 * 1024 * 1024 + 1)], "size"),
    ],
)
def test_what_is_refused_and_why(frames: list[bytes], reason: str) -> None:
    with pytest.raises(ForeignFrame) as refused:
        decode_control(frames)
    assert refused.value.reason == reason


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_fuzz(data: st.DataObject) -> None:
    _, body = data.draw(st.sampled_from(GOLDEN))
    frame = HEAD + body
    start = data.draw(st.integers(0, len(frame)))
    frame = frame[:start] + data.draw(st.binary(max_size=6)) + frame[data.draw(st.integers(start, len(frame))) :]
    for frames in ([CONTROL_GUARD, frame], [frame], [CONTROL_GUARD, data.draw(st.binary(max_size=80))]):
        try:
            found = decode_control(frames)
        except ForeignFrame:
            continue
        if isinstance(found, Control):
            assert isinstance(decode_control(encode_control(found.message, found.instance_id)), Control)


def test_the_document_names_every_message() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "pd.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (?:prefill|decode|both) \|", text, flags=re.MULTILINE)
    assert set(rows) == {message.__name__ for message in ControlMessage.__args__}
