"""What the server and its engine say to each other. Plain typed data; `core.channel` carries it."""

from __future__ import annotations

from typing import Literal

import msgspec

from diptych.core.batch import FinishReason, Speculation, TokenLogprobs
from diptych.core.calls import MemoryTag, StageCheckpoint, WorkerCall
from diptych.core.request import Request
from diptych.errors import DiptychError, RequestError

InFlight = Literal["wait", "abort", "keep", "retract"]
"""What becomes of requests in flight: finished, aborted, continued as they are, or computed again from their tokens."""


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    """Generate for this request. Answered by RequestOutputs until one is finished, or by a RequestFailed."""

    request: Request


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    """Stop these requests; unknown ids are ignored. Each is answered with finish reason `abort`. None: all."""

    request_ids: list[str] | None


class FlushCache(msgspec.Struct, tag=True, frozen=True):
    """Empty the prefix cache if the engine is idle. Answered by a Reply."""

    call_id: int


class GetLoad(msgspec.Struct, tag=True, frozen=True):
    """Ask for the engine's load now. Answered by a Reply carrying an EngineLoad."""

    call_id: int


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Refuse new requests, finish the running ones within `timeout_s` seconds, abort the rest, then stop."""

    timeout_s: float


class CallWorkers(msgspec.Struct, tag=True, frozen=True):
    """Have the workers obey a call that concerns nobody else. Answered by a Reply with its value."""

    call_id: int
    call: WorkerCall


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Compute with other weights: those of `checkpoint`, or what was staged under `update_id`.

    weight_version: what to call them; None leaves the name. Answered by a Reply with the msgpack number of requests
    that were in flight.
    """

    call_id: int
    update_id: str
    in_flight: InFlight
    checkpoint: StageCheckpoint | None = None
    weight_version: str | None = None


class SetWeightVersion(msgspec.Struct, tag=True, frozen=True):
    """Call the weights otherwise. Answered by a Reply."""

    call_id: int
    weight_version: str


class PauseGeneration(msgspec.Struct, tag=True, frozen=True):
    """Plan no steps, and hold new requests, until ContinueGeneration. Answered by a Reply once it is so."""

    call_id: int
    mode: InFlight


class ContinueGeneration(msgspec.Struct, tag=True, frozen=True):
    """End a pause. Answered by a Reply."""

    call_id: int


class ReleaseMemory(msgspec.Struct, tag=True, frozen=True):
    """Return memory to the system and refuse requests until it is resumed. Answered by a Reply."""

    call_id: int
    tags: list[MemoryTag]
    in_flight: Literal["wait", "abort"]


class ResumeMemory(msgspec.Struct, tag=True, frozen=True):
    """Have released memory again. Answered by a Reply."""

    call_id: int
    tags: list[MemoryTag]


class AddAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load the adapter in the folder `path` under a name. pinned: once on the device, it stays there.

    Answered by a Reply with a msgpack list of the `AdapterInfo` of all that are loaded then.
    """

    call_id: int
    name: str
    path: str
    pinned: bool = False


class RemoveAdapter(msgspec.Struct, tag=True, frozen=True):
    """Unload an adapter once the requests that use it have ended. Answered as AddAdapter is."""

    call_id: int
    name: str


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """A loaded adapter. digest: of its weights and scaling. rank: the largest of its modules."""

    name: str
    path: str
    digest: str
    rank: int
    pinned: bool


AdapterMessage = AddAdapter | RemoveAdapter
UpkeepCall = UpdateWeights | SetWeightVersion | PauseGeneration | ContinueGeneration | ReleaseMemory | ResumeMemory
AdministrativeCall = CallWorkers | UpkeepCall | AdapterMessage  # each is answered by a Reply once its script has ended
ToEngine = AddRequest | AbortRequests | FlushCache | GetLoad | Drain | AdministrativeCall


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How peers reach an engine. address: "ip:port" of its control socket; rank_addresses: of those at which base peers
    reach each of its ranks. instance_id: new at every start.
    """

    role: str
    instance_id: str
    address: str
    rank_addresses: tuple[str, ...] = ()
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    fingerprint: str = ""
    protocol_version: int = 1


class RankPool(msgspec.Struct, array_like=True, frozen=True):
    """What the pages of one rank hold: adjacent layers and KV heads, numbered as in the model. All have as many pages.

    kv_address: of the first page, in the rank's own process.
    """

    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int
    page_nbytes: int
    kv_address: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves; sent once, when it is ready.

    num_layers, num_kv_heads, head_dim, is_latent: what all ranks keep of a token. page_nbytes, kv_address: of the first
    rank's pool; its address is in that rank's process. pools: of every rank, in their order. fingerprint: of the
    weights. draft_fingerprint: of a draft model's, whose KV is in the last layers of every page. max_loras: adapters in
    one step at most; 0 where there can be none. weight_version: what their owner calls the weights. released: memory
    that is not there now. is_paused: no request goes on. peer: set where prefill and decode may be apart.
    """

    model_path: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    page_nbytes: int
    max_num_seqs: int
    device: str
    attention_backend: str
    load_s: float
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    is_latent: bool = False
    kv_address: int = 0
    pools: tuple[RankPool, ...] = ()
    fingerprint: str = ""
    draft_fingerprint: str = ""
    max_loras: int = 0
    weight_version: str = "default"
    released: tuple[MemoryTag, ...] = ()
    is_paused: bool = False
    peer: PeerFacts | None = None

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV fits the pool."""
        return self.num_pages * self.page_size


class TransferLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The hinge's part of a load: rooms and peers of now, totals since start. transfer_s_total: sum over writes."""

    num_outgoing_rooms: int = 0
    num_outgoing_waiting: int = 0
    num_incoming_waiting: int = 0
    num_incoming_rooms: int = 0
    num_quarantined_pages: int = 0
    num_free_rooms: int = 0
    num_peers: int = 0
    num_lost_peers: int = 0
    transport: str = "unknown"
    writes_total: int = 0
    bytes_sent_total: int = 0
    descriptors_total: int = 0
    transfer_s_total: float = 0.0
    rooms_done_total: int = 0
    failures_total: dict[str, int] = {}
    foreign_frames_total: int = 0


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine: gauges of now, counters since its start (`*_total`).

    host_s_total: CPU time of the engine's thread; compute_s_total: wall time of the worker's steps.
    prefix_queries_total: prompt tokens looked up in a prefix cache, of which cached_tokens_total were there.
    verifications_total: rows that verified drafts.
    """

    timestamp: float
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_owned_pages: int = 0
    num_quarantined_pages: int = 0
    page_size: int = 0
    num_slots: int = 0
    num_free_slots: int = 0
    generation_tokens_per_s: float = 0.0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefix_queries_total: int = 0
    generation_tokens_total: int = 0
    retractions_total: int = 0
    verifications_total: int = 0
    drafts_total: int = 0
    accepted_drafts_total: int = 0
    host_s_total: float = 0.0
    compute_s_total: float = 0.0
    transfer: TransferLoad | None = None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine accepts requests."""

    info: EngineInfo


class Changed(msgspec.Struct, tag=True, frozen=True):
    """What the engine serves is this from now on: what it said before belongs to what was served before."""

    info: EngineInfo


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress while weights load: `done` of `total` units of `what`."""

    what: str
    done: int
    total: int


class RequestOutput(msgspec.Struct, array_like=True, frozen=True):
    """New tokens of one request, and its end if `finish_reason` is set.

    matched_stop: the stop token that ended it, if one did (it is the last of token_ids). cached_tokens: prompt tokens
    taken from the prefix cache. prompt_logprobs: for prompt positions, in order, as they become known. queue_s: seconds
    from arrival to the first step; set on the first output. speculation: so far, where drafts were verified.
    weight_version: what its end was computed with; the client sets it.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    queue_s: float | None = None
    speculation: Speculation | None = None
    weight_version: str = ""


class RequestOutputs(msgspec.Struct, tag=True, frozen=True):
    """Outputs of one step, and the engine's load every so often."""

    outputs: list[RequestOutput]
    load: EngineLoad | None = None


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """The request ended in an error. `kind` is the name of a class of `diptych.errors`."""

    request_id: str
    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, request_id: str, error: DiptychError) -> RequestFailed:
        """The answer that carries `error`."""
        param = error.param if isinstance(error, RequestError) else None
        return cls(request_id, type(error).__name__, str(error), param)


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Answer to a call: `ok`, a sentence for people, and the load where it was asked for.

    value: msgpack, of the form that the call says. error_kind: the name of a class of `diptych.errors`, where one ended
    the call; `message` is then the error's.
    """

    call_id: int
    ok: bool
    message: str = ""
    load: EngineLoad | None = None
    value: bytes = b""
    error_kind: str | None = None


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine stops. Every open request has failed with it. kind: as in RequestFailed."""

    message: str
    kind: str = "WorkerError"


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """The engine has drained and ends; nothing follows."""


FromEngine = Ready | Changed | Loading | RequestOutputs | RequestFailed | Reply | Fatal | Stopped
