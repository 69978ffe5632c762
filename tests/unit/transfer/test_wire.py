"""Frames of the base format and notifications: pinned byte by byte, and any bytes at all."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.core.request import Grammar, GrammarKind, SamplingParams
from diptych.errors import InvariantError
from diptych.kv.layout import KVLayout
from diptych.transfer.extension import (
    ForeignFrame,
    LayoutFields,
    OtherVersion,
    PeerExtension,
    PrefillRequest,
    RoomExtension,
)
from diptych.transfer.wire import (
    MAX_METADATA_NBYTES,
    MAX_PAGES,
    MAX_REGIONS,
    AuxLanded,
    ChunkLanded,
    Registration,
    TransferInfo,
    decode_frames,
    decode_notification,
    encode_notification,
    encode_registration,
    encode_transfer_info,
)

LAYOUT = KVLayout.single_rank(2, 1, head_dim=4, page_size=8, dtype="bfloat16")
PEER = PeerExtension(
    instance_id="i-1",
    layout=LayoutFields.of(LAYOUT, 10),
    model_layers=2,
    model_kv_heads=1,
    model_fingerprint="m",
)
ROOM = RoomExtension(
    instance_id="i-1",
    num_cached_tokens=16,
    prompt=PrefillRequest(
        request_id="r",
        prompt_token_ids=[1, 300, 70000],
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
        timeout_s=2.5,
    ),
)
REGISTRATION = Registration(
    endpoint="10.0.0.2",
    port=4242,
    agent_name="6f1c-agent",
    agent_metadata=b"\x00nixl\xff",
    kv_addresses=(0x7F0000000000, 0x10),
    aux_addresses=(1, 2, 3, 4, 5, 6),
    gpu_id=1,
)
TRANSFER = TransferInfo(
    room=2**63 - 1,
    endpoint="10.0.0.2",
    port=4242,
    agent_name="6f1c-agent",
    dst_pages=np.array([3, 258, 0], np.int32),
    aux_slot=9,
    num_readers=2,
)

BASE_REGISTRATION_FRAMES = [
    b"NixlMsgGuard",
    b"None",
    b"10.0.0.2",
    b"4242",
    b"6f1c-agent",
    b"\x00nixl\xff",
    b"\x00\x00\x00\x00\x00\x7f\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00",
    b"".join(bytes([number, 0, 0, 0, 0, 0, 0, 0]) for number in range(1, 7)),
    b"1",
]
BASE_TRANSFER_FRAMES = [
    b"NixlMsgGuard",
    b"9223372036854775807",
    b"10.0.0.2",
    b"4242",
    b"6f1c-agent",
    b"\x03\x00\x00\x00\x02\x01\x00\x00\x00\x00\x00\x00",
    b"9",
    b"2",
]
# ["diptych", 1, {...}]; the map's count takes three bytes because the struct has more than fifteen fields, set or not
PEER_FRAME = (
    b"\x93\xa7diptych\x01\xde\x00\x05"
    b"\xabinstance_id\xa3i-1"
    b"\xa6layout\x89"
    b"\xabfirst_layer\x00\xaanum_layers\x02\xadfirst_kv_head\x00\xacnum_kv_heads\x01\xa8head_dim\x04"
    b"\xa9page_size\x08\xa5dtype\xa8bfloat16\xa9num_pages\x0a\xa6stride\xcd\x01\x00"
    b"\xacmodel_layers\x02"
    b"\xaemodel_kv_heads\x01"
    b"\xb1model_fingerprint\xa1m"
)
ROOM_FRAME = (
    b"\x93\xa7diptych\x01\x83"
    b"\xabinstance_id\xa3i-1"
    b"\xb1num_cached_tokens\x10"
    b"\xa6prompt\x84"
    b"\xaarequest_id\xa1r"
    b"\xb0prompt_token_ids\x93\x01\xcd\x01\x2c\xce\x00\x01\x11\x70"
    b"\xa8sampling\xde\x00\x02\xaamax_tokens\x04\xabtemperature\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
    b"\xa9timeout_s\xcb\x40\x04\x00\x00\x00\x00\x00\x00"
)


def same(a: TransferInfo, b: TransferInfo) -> bool:
    return encode_transfer_info(a) == encode_transfer_info(b)


def test_registration_of_the_base_format() -> None:
    assert encode_registration(REGISTRATION) == BASE_REGISTRATION_FRAMES
    assert decode_frames(BASE_REGISTRATION_FRAMES) == REGISTRATION


def test_transfer_info_of_the_base_format() -> None:
    assert encode_transfer_info(TRANSFER) == BASE_TRANSFER_FRAMES
    found = decode_frames(BASE_TRANSFER_FRAMES)
    assert isinstance(found, TransferInfo) and same(found, TRANSFER)
    assert found.dst_pages.dtype == np.int32 and found.dst_pages.tolist() == [3, 258, 0]
    assert not found.is_dummy


def test_an_empty_page_list_is_a_dummy() -> None:
    frames = [*BASE_TRANSFER_FRAMES[:5], b"", *BASE_TRANSFER_FRAMES[6:]]
    found = decode_frames(frames)
    assert isinstance(found, TransferInfo) and found.is_dummy
    assert encode_transfer_info(found) == frames


def test_our_extension_is_one_trailing_frame() -> None:
    registration = replace(REGISTRATION, extension=PEER)
    assert encode_registration(registration) == [*BASE_REGISTRATION_FRAMES, PEER_FRAME]
    assert decode_frames([*BASE_REGISTRATION_FRAMES, PEER_FRAME]) == registration
    info = replace(TRANSFER, extension=ROOM)
    assert encode_transfer_info(info) == [*BASE_TRANSFER_FRAMES, ROOM_FRAME]
    found = decode_frames([*BASE_TRANSFER_FRAMES, ROOM_FRAME])
    assert isinstance(found, TransferInfo) and found.extension == ROOM


@pytest.mark.parametrize(
    "frame", [b"", b"somebody else's", b"\x93\xa5other\x01\x80", b"\x93\xa5other", b"\x80", pickle.dumps([1])]
)
def test_trailing_frames_of_others_are_ignored(frame: bytes) -> None:
    assert decode_frames([*BASE_REGISTRATION_FRAMES, frame]) == REGISTRATION
    found = decode_frames([*BASE_TRANSFER_FRAMES, frame, ROOM_FRAME])
    assert isinstance(found, TransferInfo) and found.extension == ROOM


def test_another_version_is_reported_and_not_read() -> None:
    found = decode_frames([*BASE_REGISTRATION_FRAMES, b"\x93\xa7diptych\x07\x91\x05"])
    assert found.extension == OtherVersion(7)
    with pytest.raises(InvariantError, match="only version 1 of the extension can be sent, not 7"):
        encode_registration(found)
    assert OtherVersion(7).message.startswith("the peer speaks protocol version 7, we speak 1;")


def test_later_fields_of_the_same_version_are_ignored() -> None:
    body = {**msgspec.to_builtins(ROOM), "from_the_future": [1, 2]}
    found = decode_frames([*BASE_TRANSFER_FRAMES, msgspec.msgpack.encode(["diptych", 1, body, "more"])])
    assert found.extension == ROOM


def changed(frames: list[bytes], index: int, frame: bytes) -> list[bytes]:
    return [*frames[:index], frame, *frames[index + 1 :]]


REGISTER, INFO = BASE_REGISTRATION_FRAMES, BASE_TRANSFER_FRAMES


def peer_frame(**layout: object) -> bytes:
    return msgspec.msgpack.encode(["diptych", 1, {**msgspec.to_builtins(PEER), "layout": layout}])


HUGE = {"head_dim": 2**21, "stride": 2**27, "num_pages": 2**31 - 1}  # consistent, and beyond any memory
GOOD_LAYOUT = msgspec.to_builtins(PEER.layout)


@pytest.mark.parametrize(
    "frames,reason",
    [
        ([], "guard"),
        ([b"HTTP/1.1 200 OK"], "guard"),
        ([b""], "guard"),
        (INFO[1:], "guard"),
        (INFO[:1], "count"),
        (INFO[:7], "count"),
        (REGISTER[:8], "count"),
        ([*REGISTER, *[b""] * 8], "count"),
        (changed(INFO, 1, b"-1"), "field"),
        (changed(INFO, 1, b"9223372036854775808"), "field"),
        (changed(INFO, 1, b"1" * 5000), "field"),
        (changed(INFO, 1, "\u0661".encode()), "field"),
        (changed(INFO, 1, b"1\n"), "field"),
        (changed(INFO, 2, b""), "field"),
        (changed(INFO, 2, b"host;rm"), "field"),
        (changed(INFO, 2, b"h" * 300), "field"),
        (changed(INFO, 3, b"0"), "field"),
        (changed(INFO, 3, b"65536"), "field"),
        (changed(INFO, 4, b"a\x00b"), "field"),
        (changed(INFO, 5, b"\x00" * 5), "size"),
        (changed(INFO, 5, b"\x00" * 4 * (MAX_PAGES + 1)), "size"),
        (changed(INFO, 5, struct.pack("<2i", 4, -1)), "field"),
        (changed(INFO, 5, struct.pack("<3i", 4, 5, 4)), "field"),
        (changed(INFO, 6, b"2147483648"), "field"),
        (changed(INFO, 7, b"0"), "field"),
        (changed(INFO, 7, b"4097"), "field"),
        (changed(REGISTER, 5, b"\x00" * (MAX_METADATA_NBYTES + 1)), "size"),
        (changed(REGISTER, 6, b"\x00" * 12), "size"),
        (changed(REGISTER, 7, b"\x00" * 8 * (MAX_REGIONS + 1)), "size"),
        (changed(REGISTER, 6, b"\xff" * 8), "field"),
        (changed(REGISTER, 8, b"x"), "field"),
        ([*INFO, b"\x00" * (32 * 1024 * 1024 + 1)], "size"),
        *[([*INFO, ROOM_FRAME[:length]], "extension") for length in range(9, len(ROOM_FRAME), 7)],
        ([*REGISTER, PEER_FRAME[:-1]], "extension"),
        ([*INFO, PEER_FRAME.replace(b"\xabinstance_id", b"\xabinstance_xx")], "extension"),
        ([*INFO, ROOM_FRAME.replace(b"\xabinstance_id\xa3i-1", b"\xabinstance_id\xa0")], "extension"),
        ([*INFO, ROOM_FRAME.replace(b"\xce\x00\x01\x11\x70", b"\xce\xff\xff\xff\xff")], "extension"),
        ([*INFO, ROOM_FRAME.replace(b"max_tokens\x04", b"max_tokens\x00")], "extension"),
        ([*REGISTER, peer_frame(**{**GOOD_LAYOUT, "dtype": "int3"})], "extension"),
        ([*REGISTER, peer_frame(**{**GOOD_LAYOUT, "stride": 255})], "extension"),
        ([*REGISTER, peer_frame(**{**GOOD_LAYOUT, "num_pages": 2**31 - 1, "head_dim": 2**31 - 1})], "extension"),
        ([*REGISTER, peer_frame(**{**GOOD_LAYOUT, "num_layers": 0})], "extension"),
        ([*REGISTER, peer_frame(**{**GOOD_LAYOUT, **HUGE})], "extension"),
    ],
)
def test_what_is_refused_and_why(frames: list[bytes], reason: str) -> None:
    with pytest.raises(ForeignFrame) as refused:
        decode_frames(frames)
    assert refused.value.reason == reason
    assert len(str(refused.value)) < 700


def survives(frames: list[bytes]) -> None:
    """Decoding ends in a message that encodes again, or in ForeignFrame."""
    try:
        found = decode_frames(frames)
    except ForeignFrame:
        return
    if isinstance(found.extension, OtherVersion):
        found = replace(found, extension=None)
    if isinstance(found, Registration):
        assert decode_frames(encode_registration(found)) == found
    else:
        again = decode_frames(encode_transfer_info(found))
        assert isinstance(again, TransferInfo) and same(again, found)


JUNK = st.binary(max_size=60) | st.sampled_from(
    [pickle.dumps({"a": [1]}), b"None", b"7", PEER_FRAME, ROOM_FRAME, b"\x91" * 3000, b"\xdd\x7f\xff\xff\xff"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(JUNK, max_size=12), st.booleans())
def test_fuzz_random_frames(frames: list[bytes], is_guarded: bool) -> None:
    survives([b"NixlMsgGuard", *frames] if is_guarded else frames)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_fuzz_damaged_frames(data: st.DataObject) -> None:
    frames = list(data.draw(st.sampled_from([[*REGISTER, PEER_FRAME], [*INFO, ROOM_FRAME]])))
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(1, len(frames) - 1))
        frame = frames[index]
        position = data.draw(st.integers(0, len(frame)))
        damage = data.draw(st.sampled_from(["cut", "flip", "insert", "replace", "drop", "double"]))
        if damage == "cut":
            frames[index] = frame[:position]
        elif damage == "flip" and position < len(frame):
            frames[index] = frame[:position] + bytes([data.draw(st.integers(0, 255))]) + frame[position + 1 :]
        elif damage == "insert":
            frames[index] = frame[:position] + data.draw(st.binary(max_size=9)) + frame[position:]
        elif damage == "replace":
            frames[index] = data.draw(JUNK)
        elif damage == "drop" and len(frames) > 2:
            del frames[index]
        elif damage == "double":
            frames.insert(index, frame)
    survives(frames)


@settings(deadline=None)
@given(st.binary(max_size=400))
@example(b"\xff" * 400)
@example(b"\x91" * 400)
@example(b"\xc7\x08\xff" + b"\x01" * 8)
def test_fuzz_extension_bodies(body: bytes) -> None:
    for frames in (REGISTER, INFO):
        survives([*frames, b"\x93\xa7diptych\x01" + body])


def test_a_deep_extension_does_not_overflow_the_stack() -> None:
    for frames in (REGISTER, INFO):
        survives([*frames, b"\x93\xa7diptych\x01" + b"\x91" * 1_000_000])


def test_every_field_of_a_prompt_survives() -> None:
    sampling = SamplingParams(
        max_tokens=9, seed=2**63 - 1, stop=("a",), logit_bias={5: -1.0}, grammar=Grammar(GrammarKind.REGEX, "a+")
    )
    prompt = PrefillRequest(
        request_id="q",
        prompt_token_ids=list(range(1000)),
        sampling=sampling,
        cache_key="lora-1",
        priority=-3,
        timeout_s=0.5,
        trace_id="t",
    )
    extension = RoomExtension(instance_id="i", generation=4, prompt=prompt)
    found = decode_frames(encode_transfer_info(replace(TRANSFER, extension=extension)))
    assert found.extension == extension


@pytest.mark.parametrize(
    "notification,name",
    [
        (ChunkLanded(7, 0, False), b"7_kv_0_0"),
        (ChunkLanded(2**63 - 1, 12, True), b"9223372036854775807_kv_12_1"),
        (AuxLanded(7), b"7_aux"),
        (ChunkLanded(7, 3, True, 2), b"7_kv_3_1_2"),
        (AuxLanded(7, 0), b"7_aux_0"),
    ],
)
def test_notification_names(notification: ChunkLanded | AuxLanded, name: bytes) -> None:
    assert encode_notification(notification) == name
    assert decode_notification(name) == notification


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"7",
        b"7_kv",
        b"7_kv_1",
        b"7_kv_1_2",
        b"7_kv_1_0_3_4",
        b"7_kv__0",
        b"7_kv_-1_0",
        b"7_kv_1048577_0",
        b"7_aux_",
        b"7_aux_1_2",
        b"_aux",
        b"x_aux",
        b"7_AUX",
        b" 7_aux",
        b"7_aux\n",
        b"9223372036854775808_aux",
        b"7_kv_1_00",
        b"1" * 100 + b"_aux",
        b"\xff\xfe",
    ],
)
def test_names_that_are_no_notifications(name: bytes) -> None:
    with pytest.raises(ForeignFrame) as refused:
        decode_notification(name)
    assert refused.value.reason in ("notification", "field")


@settings(deadline=None)
@given(st.binary(max_size=120) | st.from_regex(rb"[0-9]{0,21}_(kv|aux)(_[0-9]{0,3}){0,4}", fullmatch=True))
def test_fuzz_notifications(name: bytes) -> None:
    try:
        found = decode_notification(name)
    except ForeignFrame:
        return
    assert decode_notification(encode_notification(found)) == found
