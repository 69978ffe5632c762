"""The frames of the base format, decode rank -> prefill rank, and the notifications that travel with the writes.

Owns encoding, decoding and their bounds: every size and count is checked before anything is allocated for it, and
whatever the bytes are, decoding returns a message or raises ForeignFrame. Knows no sockets, rooms or peers.

    frame  registration                    transfer info
    0      NixlMsgGuard                    NixlMsgGuard
    1      None                            room
    2, 3   endpoint, port                  endpoint, port
    4      agent name                      agent name
    5      agent metadata                  destination pages, int32
    6      KV base addresses, uint64       aux slot
    7      aux base addresses, uint64      decode ranks that name this room
    8      GPU id                          (extension)
    9      (extension)

Numbers are ASCII decimals, packed ones little-endian.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from diptych.errors import DiptychError, InvariantError
from diptych.transfer.extension import (
    MAX_ADDRESS,
    MAX_METADATA_NBYTES,
    MAX_ROOM,
    PROTOCOL_VERSION,
    ForeignFrame,
    LayoutFields,
    OtherVersion,
    PeerExtension,
    RoomExtension,
    seal,
    unseal,
)

GUARD = b"NixlMsgGuard"
NO_ROOM = b"None"

MAX_FRAMES = 16
MAX_TEXT_NBYTES = 256
MAX_REGIONS = 4096
MAX_PAGES = 1024 * 1024
MAX_WRITERS = 4096
MAX_CHUNKS = 1024 * 1024
MAX_NOTIFICATION_NBYTES = 96

_NUM_REGISTRATION_FRAMES = 9
_NUM_TRANSFER_FRAMES = 8
_HOST = re.compile(rb"[0-9A-Za-z.:_\-\[\]%]{1,255}")
_AGENT = re.compile(rb"[\x21-\x7e]{1,256}")
_NUMBER = re.compile(rb"[0-9]{1,19}")

_PEER: msgspec.msgpack.Decoder[PeerExtension] = msgspec.msgpack.Decoder(PeerExtension)
_ROOM: msgspec.msgpack.Decoder[RoomExtension] = msgspec.msgpack.Decoder(RoomExtension)
Extension = TypeVar("Extension")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A decode rank introduces itself to a prefill rank, once per pair. extension: None from a base peer."""

    endpoint: str
    port: int
    agent_name: str
    agent_metadata: bytes
    kv_addresses: tuple[int, ...]
    aux_addresses: tuple[int, ...]
    gpu_id: int
    extension: PeerExtension | OtherVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferInfo:
    """Where a decode rank wants one room's KV, once per room and prefill rank.

    dst_pages: int32, each once; empty: this rank needs no KV from that one. num_readers: decode ranks that will name
    this room to this prefill rank (required_dst_info_num).
    """

    room: int
    endpoint: str
    port: int
    agent_name: str
    dst_pages: NDArray[np.int32] = field(repr=False)
    aux_slot: int
    num_readers: int
    extension: RoomExtension | OtherVersion | None = None

    @property
    def is_dummy(self) -> bool:
        """Whether it asks for no KV at all. Never a prefix hit: the page of the last prompt token is always sent."""
        return len(self.dst_pages) == 0


@dataclass(frozen=True, slots=True)
class ChunkLanded:
    """Notification: the writes of one chunk of one room have landed. writer: its rank, None from a base peer."""

    room: int
    chunk: int
    is_last: bool
    writer: int | None = None


@dataclass(frozen=True, slots=True)
class AuxLanded:
    """Notification: the handoff state of one room has landed. writer: as in ChunkLanded."""

    room: int
    writer: int | None = None


Notification = ChunkLanded | AuxLanded


def encode_registration(message: Registration) -> list[bytes]:
    """The frames of a registration."""
    frames = [
        GUARD,
        NO_ROOM,
        message.endpoint.encode("ascii"),
        _decimal(message.port),
        message.agent_name.encode("ascii"),
        message.agent_metadata,
        np.array(message.kv_addresses, dtype="<u8").tobytes(),
        np.array(message.aux_addresses, dtype="<u8").tobytes(),
        _decimal(message.gpu_id),
    ]
    return [*frames, *_sealed(message.extension)]


def encode_transfer_info(message: TransferInfo) -> list[bytes]:
    """The frames of a transfer info."""
    frames = [
        GUARD,
        _decimal(message.room),
        message.endpoint.encode("ascii"),
        _decimal(message.port),
        message.agent_name.encode("ascii"),
        message.dst_pages.astype("<i4").tobytes(),
        _decimal(message.aux_slot),
        _decimal(message.num_readers),
    ]
    return [*frames, *_sealed(message.extension)]


def decode_frames(frames: Sequence[bytes]) -> Registration | TransferInfo:
    """The message in one multipart. Raises ForeignFrame, and nothing else, for anything that is not one."""
    if not frames or frames[0] != GUARD:
        raise ForeignFrame("guard", f"a message of {len(frames)} frames does not begin with {GUARD.decode()}")
    if not _NUM_TRANSFER_FRAMES <= len(frames) <= MAX_FRAMES:
        raise ForeignFrame("count", f"{len(frames)} frames; a message has {_NUM_TRANSFER_FRAMES} to {MAX_FRAMES}")
    return _registration(frames) if frames[1] == NO_ROOM else _transfer_info(frames)


def encode_notification(notification: Notification) -> bytes:
    """Its name: `{room}_kv_{chunk}_{0|1}` or `{room}_aux`, and `_{writer}` where both sides speak our extension."""
    name = f"{notification.room}_aux"
    if isinstance(notification, ChunkLanded):
        name = f"{notification.room}_kv_{notification.chunk}_{int(notification.is_last)}"
    return (name if notification.writer is None else f"{name}_{notification.writer}").encode("ascii")


def decode_notification(name: bytes) -> Notification:
    """The notification of this name. Raises ForeignFrame, and nothing else, for any other."""
    if len(name) > MAX_NOTIFICATION_NBYTES:
        raise ForeignFrame("notification", f"a notification of {len(name)} bytes is over {MAX_NOTIFICATION_NBYTES}")
    match name.split(b"_"):
        case [room, b"aux", *writer] if len(writer) <= 1:
            return AuxLanded(_number(room, "room", MAX_ROOM), _writer(writer))
        case [room, b"kv", chunk, (b"0" | b"1") as last, *writer] if len(writer) <= 1:
            number = _number(chunk, "chunk", MAX_CHUNKS)
            return ChunkLanded(_number(room, "room", MAX_ROOM), number, last == b"1", _writer(writer))
    raise ForeignFrame("notification", f"{name[:40]!r} is no notification of a transfer")


def _sealed(extension: PeerExtension | RoomExtension | OtherVersion | None) -> list[bytes]:
    if isinstance(extension, OtherVersion):
        raise InvariantError(f"only version {PROTOCOL_VERSION} of the extension can be sent, not {extension.version}")
    return [] if extension is None else [seal(extension)]


def _registration(frames: Sequence[bytes]) -> Registration:
    if len(frames) < _NUM_REGISTRATION_FRAMES:
        raise ForeignFrame("count", f"a registration of {len(frames)} frames; it has {_NUM_REGISTRATION_FRAMES}")
    if len(frames[5]) > MAX_METADATA_NBYTES:
        raise ForeignFrame("size", f"agent metadata of {len(frames[5])} bytes is over {MAX_METADATA_NBYTES}")
    extension = _extension(frames, _NUM_REGISTRATION_FRAMES, _PEER)
    if isinstance(extension, PeerExtension):
        _check_layouts(extension)
    return Registration(
        endpoint=_text(frames[2], "endpoint", _HOST),
        port=_number(frames[3], "port", 2**16 - 1, lowest=1),
        agent_name=_text(frames[4], "agent name", _AGENT),
        agent_metadata=bytes(frames[5]),
        kv_addresses=_addresses(frames[6], "KV"),
        aux_addresses=_addresses(frames[7], "aux"),
        gpu_id=_number(frames[8], "GPU id", 2**16 - 1),
        extension=extension,
    )


def _transfer_info(frames: Sequence[bytes]) -> TransferInfo:
    extension = _extension(frames, _NUM_TRANSFER_FRAMES, _ROOM)
    return TransferInfo(
        room=_number(frames[1], "room", MAX_ROOM),
        endpoint=_text(frames[2], "endpoint", _HOST),
        port=_number(frames[3], "port", 2**16 - 1, lowest=1),
        agent_name=_text(frames[4], "agent name", _AGENT),
        dst_pages=_pages(frames[5]),
        aux_slot=_number(frames[6], "aux slot", 2**31 - 1),
        num_readers=_number(frames[7], "number of decode ranks", MAX_WRITERS, lowest=1),
        extension=extension,
    )


def _extension(
    frames: Sequence[bytes], index: int, decoder: msgspec.msgpack.Decoder[Extension]
) -> Extension | OtherVersion | None:
    """Ours, if it is among the trailing frames; others' are ignored, as a reader that does not know ours ignores it."""
    for frame in frames[index:]:
        extension = unseal(frame, decoder)
        if extension is not None:
            return extension
    return None


def _check_layouts(extension: PeerExtension) -> None:
    try:
        extension.shape()
    except DiptychError as error:
        raise ForeignFrame("extension", f"a peer's layout is none: {error}") from None
    _check_span(extension.layout)
    for rank in extension.ranks:
        _check_span(rank.layout)


def _check_span(fields: LayoutFields) -> None:
    """Products of bounded fields: so that an address computed from them cannot leave int64."""
    layout = fields.layout()
    span = layout.page_nbytes * fields.num_pages
    if fields.stride != layout.page_nbytes or span > MAX_ADDRESS:
        raise ForeignFrame("extension", f"a peer's pages of {layout.page_nbytes} bytes do not fit {fields}")


def _decimal(number: int) -> bytes:
    return str(number).encode("ascii")


def _number(frame: bytes, what: str, highest: int, *, lowest: int = 0) -> int:
    if not _NUMBER.fullmatch(frame):
        raise ForeignFrame("field", f"{what} must be a decimal number, got {frame[:40]!r}")
    number = int(frame)
    if not lowest <= number <= highest:
        raise ForeignFrame("field", f"{what} must be between {lowest} and {highest}, got {number}")
    return number


def _text(frame: bytes, what: str, pattern: re.Pattern[bytes]) -> str:
    if len(frame) > MAX_TEXT_NBYTES or not pattern.fullmatch(frame):
        raise ForeignFrame("field", f"{what} is not printable, empty or longer than {MAX_TEXT_NBYTES}: {frame[:40]!r}")
    return frame.decode("ascii")


def _addresses(frame: bytes, what: str) -> tuple[int, ...]:
    if len(frame) % 8 or len(frame) > MAX_REGIONS * 8:
        raise ForeignFrame("size", f"{what} addresses of {len(frame)} bytes: 8 each, {MAX_REGIONS} at most")
    packed = np.frombuffer(frame, dtype="<u8")
    if len(packed) and int(packed.max()) > MAX_ADDRESS:
        raise ForeignFrame("field", f"a {what} address is beyond any memory: {int(packed.max()):#x}")
    return tuple(packed.tolist())


def _pages(frame: bytes) -> NDArray[np.int32]:
    if len(frame) % 4 or len(frame) > MAX_PAGES * 4:
        raise ForeignFrame("size", f"page indices of {len(frame)} bytes: 4 each, {MAX_PAGES} pages at most")
    pages = np.frombuffer(frame, dtype="<i4").astype(np.int32)
    if len(pages) and int(pages.min()) < 0:
        raise ForeignFrame("field", f"a page index is negative: {int(pages.min())}")
    if len(np.unique(pages)) != len(pages):
        raise ForeignFrame("field", f"{len(pages) - len(np.unique(pages))} of {len(pages)} pages are named twice")
    return pages


def _writer(rest: list[bytes]) -> int | None:
    return _number(rest[0], "writer", MAX_WRITERS) if rest else None
