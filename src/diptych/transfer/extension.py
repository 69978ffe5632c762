"""What our peers tell each other beyond the base format: one trailing msgpack frame with a version.

Owns the structs, their bounds, and the comparison of two peers. The envelope is `["diptych", version, body]`: a
trailing frame that is no such array belongs to somebody else and is ignored; one of another version is reported as
that. Within a version structs only grow, by fields with defaults: unknown ones are ignored. Knows no sockets and no
clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from diptych.core.request import Request, SamplingParams
from diptych.errors import DiptychError, PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.ranks import Ranks

PROTOCOL_NAME = "diptych"
PROTOCOL_VERSION = 1

MAX_EXTENSION_NBYTES = 32 * 1024 * 1024
MAX_PROMPT_TOKENS = 4 * 1024 * 1024
MAX_ADAPTERS = 4096
MAX_RANKS = 1024
MAX_METADATA_NBYTES = 4 * 1024 * 1024
MAX_ROOM = 2**63 - 1
MAX_ADDRESS = 2**57 - 1  # five-level page tables; so that address plus offset always fits int64

Word = Annotated[str, Meta(max_length=256)]
Sentence = Annotated[str, Meta(max_length=4096)]
Identity = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Room = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Address = Annotated[int, Meta(ge=0, le=MAX_ADDRESS)]

Body = TypeVar("Body")


class ForeignFrame(DiptychError):
    """Bytes that are no message of the protocol: whoever reads them drops and counts them, and goes on.

    reason: one word for a metric's label: guard, count, size, field, extension or notification.
    """

    code = "foreign_frame"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OtherVersion(msgspec.Struct, frozen=True):
    """A peer of ours that speaks another version of the extension; it is refused, with both named."""

    version: int

    @property
    def message(self) -> str:
        """Why it is refused."""
        return f"the peer speaks protocol version {self.version}, we speak {PROTOCOL_VERSION}; upgrade one of them"


class LayoutFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A KVLayout and the pool that has it. stride: bytes from one page to the next."""

    first_layer: Count
    num_layers: Size
    first_kv_head: Count
    num_kv_heads: Size
    head_dim: Size
    page_size: Size
    dtype: Word
    num_pages: Size
    stride: Annotated[int, Meta(ge=1, le=MAX_ADDRESS)]
    is_latent: bool = False

    @classmethod
    def of(cls, layout: KVLayout, num_pages: int) -> LayoutFields:
        """The fields that describe `num_pages` pages of `layout`."""
        return cls(
            first_layer=layout.layers.start,
            num_layers=layout.num_layers,
            first_kv_head=layout.kv_heads.start,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            page_size=layout.page_size,
            dtype=layout.dtype,
            num_pages=num_pages,
            stride=layout.page_nbytes,
            is_latent=layout.is_latent,
        )

    def layout(self) -> KVLayout:
        """The layout. Raises ConfigError if it is none."""
        return KVLayout(
            layers=range(self.first_layer, self.first_layer + self.num_layers),
            kv_heads=range(self.first_kv_head, self.first_kv_head + self.num_kv_heads),
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            is_latent=self.is_latent,
        )


class RankFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the ranks of an engine that has several.

    lifeline: "host:port" at which its process listens and never answers; refused means that it is dead. In a
    registration also its agent, and where its pool is.
    """

    layout: LayoutFields
    lifeline: Word = ""
    agent_name: Word = ""
    agent_metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_NBYTES)] = b""
    kv_address: Address = 0
    kv_device: Annotated[int, Meta(ge=0, le=2**16 - 1)] = 0


class PeerExtension(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who an engine is, and what it can exchange; in the registration, and in an engine's answer to it.

    instance_id: new at every start of the engine. control_endpoint: where it listens for control messages
    (`tcp://...`), if that is not the endpoint of the frame. model_layers, model_kv_heads: of the whole model. ranks:
    all of them, rank = pp_rank * tp_size + tp_rank, if there are several; layout and frame then speak of the first.
    Fingerprints: of weights and revision; adapters by name; draft is empty without one. weight_version: what the
    weights are called, empty for those of the start. num_top_logprobs, hidden_nbytes: shape of its handoff rows, which
    are in host memory; kv_memory: where its pools are.
    """

    instance_id: Identity
    layout: LayoutFields
    model_layers: Size
    model_kv_heads: Size
    model_fingerprint: Word
    tp_size: Size = 1
    pp_size: Size = 1
    dp_size: Size = 1
    ranks: Annotated[list[RankFields], Meta(max_length=MAX_RANKS)] = []
    control_endpoint: Word = ""
    adapter_fingerprints: Annotated[dict[Word, Word], Meta(max_length=MAX_ADAPTERS)] = {}
    draft_fingerprint: Word = ""
    weight_version: Word = ""
    num_top_logprobs: Count = 0
    hidden_nbytes: Count = 0
    kv_memory: Literal["dram", "vram"] = "dram"

    @property
    def lifelines(self) -> list[str]:
        """What must be refused, besides the control endpoint, before all of it is dead."""
        return [rank.lifeline for rank in self.ranks if rank.lifeline]

    def shape(self) -> Ranks:
        """Which rank holds what. Raises PeerIncompatible or ConfigError if that is no engine."""
        layouts = [rank.layout.layout() for rank in self.ranks] or [self.layout.layout()]
        if len(layouts) != self.tp_size * self.pp_size:
            raise PeerIncompatible(
                f"{len(layouts)} ranks are described, tp_size {self.tp_size} x pp_size {self.pp_size} has"
                f" {self.tp_size * self.pp_size}"
            )
        return Ranks(tuple(layouts), self.tp_size, self.dp_size)


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt that decode asks prefill to compute. timeout_s: seconds left; clocks of two hosts need not agree."""

    request_id: Identity
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    cache_key: Word = ""
    adapter: Word = ""
    adapter_digest: Word = ""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    timeout_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    trace_id: Word = ""

    @classmethod
    def of(cls, request: Request, now: float, trace_id: str = "") -> PrefillRequest:
        """What to send for `request` at `now`, in `time.time()`."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_key=request.cache_key,
            adapter=request.adapter,
            adapter_digest=request.adapter_digest,
            priority=request.priority,
            timeout_s=None if request.deadline is None else max(0.0, request.deadline - now),
            trace_id=trace_id,
        )

    def request(self, now: float) -> Request:
        """The request as the prefill engine runs it, arrived at `now`."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            cache_key=self.cache_key,
            adapter=self.adapter,
            adapter_digest=self.adapter_digest,
            priority=self.priority,
            arrival_time=now,
            deadline=None if self.timeout_s is None else now + self.timeout_s,
        )


class RoomExtension(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a decode rank says about one room beyond the base format.

    to_instance: whom it is meant for; another instance at that address must not serve it, for decode may take the death
    of the first as proof that nothing lands. generation: sets apart two uses of one room number. num_cached_tokens:
    what decode holds already, whole pages of its own size; the page indices of the frame begin after them. adapter: the
    one with which decode goes on, and its digest. prompt: set where decode drives. dp_group: the data-parallel group of
    decode whose pages these are. knows_you: it has seen who the prefill engine is, and so knows whose death would prove
    that nothing lands.
    """

    instance_id: Identity
    to_instance: Word = ""
    generation: Count = 0
    num_cached_tokens: Count = 0
    adapter: Word = ""
    adapter_digest: Word = ""
    prompt: PrefillRequest | None = None
    dp_group: Count = 0
    knows_you: bool = False


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    name: Annotated[str, Meta(max_length=32)]
    version: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    body: msgspec.Raw


_MARK = msgspec.msgpack.encode(PROTOCOL_NAME)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)


def seal(body: object) -> bytes:
    """The frame that carries `body`."""
    return msgspec.msgpack.encode([PROTOCOL_NAME, PROTOCOL_VERSION, body])


def unseal(frame: bytes, decoder: msgspec.msgpack.Decoder[Body]) -> Body | OtherVersion | None:
    """The body of a frame; None if it is not ours. Raises ForeignFrame if it is, but broken or too large."""
    if len(frame) > MAX_EXTENSION_NBYTES:
        raise ForeignFrame("size", f"an extension of {len(frame)} bytes is over the limit of {MAX_EXTENSION_NBYTES}")
    try:
        envelope = _ENVELOPE.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if _MARK in frame[:16]:  # ours, but damaged: to ignore it would mean to take the peer for a base peer
            raise ForeignFrame("extension", f"a frame of our protocol does not decode: {error}") from None
        return None
    if envelope.name != PROTOCOL_NAME:
        return None
    if envelope.version != PROTOCOL_VERSION:
        return OtherVersion(envelope.version)
    try:
        return decoder.decode(envelope.body)
    except (msgspec.DecodeError, ValueError, RecursionError, DiptychError) as error:
        raise ForeignFrame("extension", f"a frame of our protocol does not decode: {error}") from None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing in which two peers differ and must not."""

    what: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        return f"{self.what} is {self.ours} here and {self.theirs} there"


def mismatches(ours: PeerExtension, theirs: PeerExtension) -> list[Mismatch]:
    """Why no KV can move between two peers; empty if it can. Page sizes, sharding and free adapters may differ.

    An adapter that only one side has is that request's matter; one that both have must be the same.
    """
    pairs: list[tuple[str, object, object]] = [
        ("model", ours.model_fingerprint, theirs.model_fingerprint),
        ("number of layers", ours.model_layers, theirs.model_layers),
        ("number of KV heads", ours.model_kv_heads, theirs.model_kv_heads),
        ("head_dim", ours.layout.head_dim, theirs.layout.head_dim),
        ("latent KV", ours.layout.is_latent, theirs.layout.is_latent),
        ("KV dtype", ours.layout.dtype, theirs.layout.dtype),
        ("weight version", ours.weight_version or "default", theirs.weight_version or "default"),
        ("draft model", ours.draft_fingerprint or "none", theirs.draft_fingerprint or "none"),
        ("size of the hidden state", ours.hidden_nbytes, theirs.hidden_nbytes),
    ]
    for name in sorted(ours.adapter_fingerprints.keys() & theirs.adapter_fingerprints.keys()):
        pairs.append((f"adapter {name!r}", ours.adapter_fingerprints[name], theirs.adapter_fingerprints[name]))
    return [Mismatch(*pair) for pair in pairs if pair[1] != pair[2]]
