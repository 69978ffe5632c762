"""Messages between peers that both speak our extension: a guard frame, then one sealed msgpack frame.

Owns the types, their direction and the codec. Registration and transfer info stay in `wire`: a prefill rank's socket
receives both, told apart by frame 0. Every message names its sender's instance, so that news from before a restart is
recognised. Knows no sockets.

    decode -> prefill    Hello, Cancel, Heartbeat, Leaving
    prefill -> decode    HelloReply, Joined, FirstToken, Failed, Quiesced, Heartbeat, Leaving
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from diptych.core.batch import FinishReason, TokenLogprobs
from diptych.transfer.extension import (
    MAX_PROMPT_TOKENS,
    Count,
    ForeignFrame,
    Identity,
    OtherVersion,
    PeerExtension,
    Room,
    Sentence,
    TokenId,
    Word,
    seal,
    unseal,
)

CONTROL_GUARD = b"DiptychPeer"


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Who are you? Sent to an address from which a peer is no longer heard; answered by a HelloReply with its nonce."""

    identity: PeerExtension
    nonce: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class HelloReply(msgspec.Struct, tag=True, frozen=True):
    """Answer to a registration (nonce 0) or a Hello. refusal: why no KV can move, both values named; empty if it can.

    Whoever answers a Hello is alive at that address after the Hello was sent, so every other instance that was known
    there before is dead.
    """

    identity: PeerExtension
    refusal: Sentence = ""
    nonce: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class FirstToken(msgspec.Struct, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """What prefill sampled, sent at once: before the KV has landed. The handoff state repeats what fits it.

    cached_tokens: prompt tokens that prefill took from its prefix cache. logprobs: of the token, if asked for.
    prompt_logprobs: if asked for. finish_reason: set if the token ends the output (then no KV follows). matched_stop:
    the stop token that did.
    """

    room: Room
    generation: Count = 0
    token_id: TokenId
    cached_tokens: Count = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Annotated[list[TokenLogprobs], Meta(max_length=MAX_PROMPT_TOKENS)] = []
    finish_reason: FinishReason | None = None
    matched_stop: TokenId | None = None


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """Prefill will not deliver this room. has_posted: a write may still land, a Quiesced follows; else none ever will.

    kind: the name of a class of `diptych.errors`; param: as in RequestError.
    """

    room: Room
    generation: Count = 0
    kind: Word
    message: Sentence
    param: Word | None = None
    has_posted: bool = False


class Joined(msgspec.Struct, tag=True, frozen=True):
    """Prefill knows the room; answer to every transfer info of an open room, so that decode need not repeat it."""

    room: Room
    generation: Count = 0


class Quiesced(msgspec.Struct, tag=True, frozen=True):
    """No further write of this room will be posted, and none is in flight, from any rank of the sender.

    Also sent when everything was delivered, and as the answer to a transfer info of a room that is over.
    """

    room: Room
    generation: Count = 0


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Decode no longer wants this room. Answered by a Quiesced, always: also for an unknown or finished room."""

    room: Room
    generation: Count = 0


class PeerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a peer can take on: its credits."""

    num_running: Count = 0
    num_waiting: Count = 0
    num_free_pages: Count = 0
    num_free_slots: Count = 0
    num_free_rooms: Count = 0


class Heartbeat(msgspec.Struct, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """Sent both ways at a steady pace. sequence: 1, 2, ...; seen: the last one that came from the other side."""

    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    seen: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    load: PeerLoad | None = None


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """I finish what I have within `timeout_s` seconds and take no new rooms."""

    timeout_s: Annotated[float, Meta(ge=0, le=1e9)]


ControlMessage = Hello | HelloReply | Joined | FirstToken | Failed | Quiesced | Cancel | Heartbeat | Leaving


class Control(msgspec.Struct, array_like=True, frozen=True):
    """One control message and the instance that sent it."""

    instance_id: Identity
    message: ControlMessage


_DECODER: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode_control(message: ControlMessage, instance_id: str) -> list[bytes]:
    """The frames of a message from `instance_id`."""
    return [CONTROL_GUARD, seal(Control(instance_id, message))]


def decode_control(frames: Sequence[bytes]) -> Control | OtherVersion:
    """The message in one multipart. Raises ForeignFrame, and nothing else, for anything that is not one."""
    if not frames or frames[0] != CONTROL_GUARD:
        raise ForeignFrame("guard", f"a message of {len(frames)} frames does not begin with {CONTROL_GUARD.decode()}")
    if len(frames) != 2:
        raise ForeignFrame("count", f"{len(frames)} frames; a control message has 2")
    control = unseal(frames[1], _DECODER)
    if control is None:
        raise ForeignFrame("extension", f"a control message of {len(frames[1])} bytes has no envelope of ours")
    return control
