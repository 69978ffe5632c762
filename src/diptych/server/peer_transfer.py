"""A decode engine without a model, which asks a prefill engine for prompts and times how their pages land here.

What a real decode engine does, by its own code: meet the peer, be refused if the layouts do not fit, ask, receive. The
pages go into host memory of this process and are thrown away. Used by `diptych doctor`.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zmq

from diptych import env
from diptych.config import EngineConfig, TransferConfig
from diptych.core.batch import Batch, RowOutput, StepOutput
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import EngineInfo, FromEngine, ToEngine
from diptych.core.request import Request, SamplingParams, TakeFrom
from diptych.engine.engine import EngineCore
from diptych.engine.executor import PolledExecutor
from diptych.errors import PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.server.client import EngineClient
from diptych.server.registry_client import PrefillSummary, RankRoute
from diptych.transfer.backend import MemoryKind
from diptych.transfer.ucx import carrier, tcp_bytes_received

TIMEOUT_S = 20.0
_REPEATS = 3
_TELLING_NBYTES = 2**16  # what the engines say to each other meanwhile is a few KiB
_VOCAB_SIZE = 256  # every model has these token ids


@dataclass(frozen=True, slots=True)
class Landing:
    """One prompt length. land_s: from its first token to its last page, 0 if both were there at once; ttft_s: from
    asking to its first token.
    """

    num_tokens: int
    nbytes: int
    ttft_s: float
    land_s: float
    tcp_nbytes: int

    @property
    def gb_per_s(self) -> float:
        """As the decode engine sees it: planning, posting, copying and the notification; 0 if it took no time."""
        return self.nbytes / self.land_s / 1e9 if self.land_s else 0.0

    @property
    def transport(self) -> str:
        """What carried it; "unknown" if it was too small to tell."""
        if self.nbytes < _TELLING_NBYTES:
            return "unknown"
        return carrier(MemoryKind.DRAM, self.nbytes, self.tcp_nbytes)


def _step(batch: Batch) -> StepOutput:
    """Computes nothing: every row that samples gets token 0."""
    return StepOutput(batch.step_id, [RowOutput([0] if step.samples else []) for step in batch.steps], 0.0)


def receive_from(route: RankRoute, summary: PrefillSummary, lengths: Sequence[int]) -> list[Landing]:
    """Ask the engine for random prompts of these lengths, one after the other.

    Raises: PeerIncompatible naming both values if nothing could move between us; other errors of the package.
    """
    info, memory = _like(summary, sum(lengths) * (_REPEATS + 1) + 16 * len(lengths))
    transfer = TransferConfig(
        role="decode", peer_host=_own_address(route), local_prefill=False, cluster_key=env.cluster_key()
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = "inproc://peer-transfer"
    outer = open_socket(context, endpoint, bind=True)
    inner: Channel[FromEngine, ToEngine] = Channel(open_socket(context, endpoint, bind=False), ToEngine)
    core = EngineCore(EngineConfig(transfer=transfer), PolledExecutor(info, _step), inner)
    thread = threading.Thread(target=core.run, name="diptych-peer-transfer")
    thread.start()
    try:
        return asyncio.run(_measure(EngineClient(outer), route, info, lengths))
    finally:
        thread.join()
        context.term()
        del memory  # until here peers might have written to it


def _like(summary: PrefillSummary, num_tokens: int) -> tuple[EngineInfo, object]:
    """What an engine of the same model would say of itself, with a pool in memory of our own, which comes along."""
    shape = (summary.num_layers, summary.num_kv_heads, summary.head_dim, summary.page_size)
    num_layers, num_kv_heads, head_dim, page_size = (value or 0 for value in shape)
    if summary.dtype is None or not all((num_layers, num_kv_heads, head_dim, page_size)):
        raise PeerIncompatible("its registry does not tell its KV layout, so no pages can be asked for")
    layout = KVLayout.single_rank(
        num_layers,
        num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=summary.dtype,
        is_latent=summary.is_latent,
    )
    num_pages = -(-num_tokens // page_size)
    memory = np.ones(num_pages * layout.page_nbytes, dtype=np.uint8)
    info = EngineInfo(
        model_path="none",
        architecture=summary.architecture or "",
        dtype=summary.dtype,
        vocab_size=_VOCAB_SIZE,
        max_model_len=num_tokens,
        eos_token_ids=(),
        page_size=page_size,
        num_pages=num_pages,
        page_nbytes=layout.page_nbytes,
        max_num_seqs=1,
        device="cpu",
        attention_backend="none",
        load_s=0.0,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        is_latent=summary.is_latent,
        kv_address=memory.ctypes.data,
        fingerprint=summary.fingerprint,
    )
    return info, memory


def _own_address(route: RankRoute) -> str:
    """The address of this machine on the way to the peer."""
    family = socket.AF_INET6 if ":" in route.rank_ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((route.rank_ip, route.rank_port))  # sends nothing
        return str(way.getsockname()[0])


async def _measure(client: EngineClient, route: RankRoute, info: EngineInfo, lengths: Sequence[int]) -> list[Landing]:
    try:
        await client.start()
        found = []
        for num_tokens in lengths:
            async with asyncio.timeout(TIMEOUT_S):
                await _ask(client, route, info, num_tokens)  # the first meets the peer, and touches pages
                tries = [await _ask(client, route, info, num_tokens) for _ in range(_REPEATS)]
            found.append(sorted(tries, key=lambda landing: landing.land_s)[len(tries) // 2])
        return found
    finally:
        await client.drain(0.0)
        client.close()


async def _ask(client: EngineClient, route: RankRoute, info: EngineInfo, num_tokens: int) -> Landing:
    """One prompt. Of its two tokens the first comes from the peer, and the second when all has landed."""
    source = random.Random()
    request = Request(
        request_id=f"doctor-{source.getrandbits(63)}",
        prompt_token_ids=[source.randrange(_VOCAB_SIZE) for _ in range(num_tokens)],
        sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        arrival_time=time.time(),
        handoff=TakeFrom(route.address, route.instance_id),
    )
    began, before = time.perf_counter(), tcp_bytes_received()
    arrivals = []
    async for output in client.generate(request):
        arrivals += [time.perf_counter()] * len(output.token_ids)
    pages = -(-num_tokens // info.page_size)
    tcp_nbytes = tcp_bytes_received() - before
    return Landing(num_tokens, pages * info.page_nbytes, arrivals[0] - began, arrivals[-1] - arrivals[0], tcp_nbytes)
