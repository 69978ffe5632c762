"""Joins an engine to its peers: control sockets, the transfer agent's thread, handoff rows, and the hinge over them.

Built once the worker has its pool; the engine's loop gives it a turn before each plan. Engine thread, except that the
agent's thread queues its events. Never imports torch.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import time
import uuid
from collections import Counter

import numpy as np

from diptych.config import TransferConfig
from diptych.core.messages import EngineInfo, PeerFacts, TransferLoad
from diptych.core.request import MAX_LOGPROBS, HandTo, Request
from diptych.errors import ConfigError, DiptychError, Unavailable
from diptych.kv.layout import KVLayout
from diptych.scheduler.scheduler import Scheduler
from diptych.transfer.agent import AgentFailed, AgentReady, PeerAdded, PeerRemoved, TransferEvent, WriteDone
from diptych.transfer.backend import HOST, MemoryKind, MemoryRegion, MemorySpace
from diptych.transfer.extension import PROTOCOL_VERSION, LayoutFields, PeerExtension
from diptych.transfer.handoff import HandoffLayout, HandoffRows, HandoffSlots
from diptych.transfer.hinge import Hinge
from diptych.transfer.metadata_probe import MetadataProbe
from diptych.transfer.nixl import NixlBackend
from diptych.transfer.peers import PeerState
from diptych.transfer.ports import HingeLimits, Site
from diptych.transfer.sockets import ZmqNetwork
from diptych.transfer.ucx import carrier_of
from diptych.worker.transfer_agent import TransferAgent

logger = logging.getLogger(__name__)

AGENT_START_S = 60.0
HINT = (
    "do both processes see the same GPUs (cuda_ipc) or an RDMA device, is a UCX_* variable set, is the KV pool made of "
    "expandable segments?"
)


class Peering:
    """One engine's face to its peers.

    Args: config: resolved. info: of the loaded worker; its pool is registered. role: what is advertised. Raises
    ConfigError if sockets or NIXL cannot be had.
    """

    def __init__(self, config: TransferConfig, info: EngineInfo, role: str) -> None:
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self.network = ZmqNetwork(config.peer_host, config.peer_port, cluster_key=config.cluster_key)
        self._instance_id = uuid.uuid4().hex
        self._handoff = HandoffLayout(num_slots=config.max_rooms, num_top_logprobs=MAX_LOGPROBS, hidden_nbytes=0)
        self._rows = np.zeros(self._handoff.nbytes, dtype=np.uint8)
        self._agent = self._start_agent(info)
        try:
            ready = self._wait_ready()
        except DiptychError:
            self.close()
            raise
        site = self._site(config, info, ready)
        self.hinge = Hinge(site, self.network, mover=self._agent, limits=_limits(config), rng=random.SystemRandom())
        self.facts = PeerFacts(
            role=role,
            instance_id=self._instance_id,
            address=site.address,
            fingerprint=info.fingerprint,
            protocol_version=PROTOCOL_VERSION,
        )
        self._totals: Counter[str] = Counter()
        self._transfer_s = 0.0
        self._transports: dict[str, str] = {}  # by agent
        self._kind = _kv_space(info).kind

    @property
    def wake_fds(self) -> tuple[object, int]:
        """What the engine's loop waits for: the control socket, and the agent's events."""
        return self.network.inbox, self._wake_read

    def turn(self, scheduler: Scheduler, *, is_draining: bool) -> None:
        """Take what peers and the agent say, and give the scheduler the prompts that peers send."""
        now, wall_clock = time.monotonic(), time.time()
        self.hinge.keep_time(now, wall_clock)
        while not self._events.empty():
            event = self._events.get()
            os.read(self._wake_read, 1)
            self._note(event)
            self.hinge.on_event(event)
        self.hinge.tick(now, wall_clock)
        for request in self.hinge.sender.take_requests():
            try:
                if is_draining:
                    raise Unavailable("the prefill engine is shutting down")
                scheduler.add(request)
            except DiptychError as error:
                self.hinge.sender.refuse(request, error)

    def add(self, request: Request, scheduler: Scheduler) -> None:
        """Queue a request that the server sent, meeting its room if it has one. Raises what refuses it."""
        if not isinstance(request.handoff, HandTo):
            scheduler.add(request)
            return
        self.hinge.sender.expect(request, time.monotonic())
        try:
            scheduler.add(request)
        except DiptychError as error:
            self.hinge.sender.refuse(request, error)
            raise

    def load(self, num_quarantined_pages: int, num_awaiting_pages: int) -> TransferLoad:
        """Gauges and totals of now."""
        sender, receiver = self.hinge.sender, self.hinge.receiver
        peers = list(self.hinge.peers)
        return TransferLoad(
            num_outgoing_rooms=len(sender.rooms),
            num_outgoing_waiting=sum(not outgoing.is_joined for _, outgoing in sender.rooms),
            num_incoming_waiting=num_awaiting_pages,
            num_incoming_rooms=len(receiver.rooms),
            num_quarantined_pages=num_quarantined_pages,
            num_free_rooms=min(sender.rooms.num_free, receiver.rooms.num_free),
            num_peers=len(peers),
            num_lost_peers=sum(peer.state is PeerState.LOST for peer in peers),
            transport=self._transport,
            writes_total=self._totals["writes"],
            bytes_sent_total=self._totals["bytes"],
            descriptors_total=self._totals["descriptors"],
            transfer_s_total=self._transfer_s,
            rooms_done_total=sender.num_done + receiver.num_done,
            failures_total=dict(sender.failures + receiver.failures),
            foreign_frames_total=self.hinge.foreign_frames.total(),
        )

    def close(self) -> None:
        """End the agent's thread and close the sockets."""
        self._agent.close()
        self.network.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _start_agent(self, info: EngineInfo) -> TransferAgent:
        space = _kv_space(info)
        regions = [
            MemoryRegion(info.kv_address, info.num_pages * info.page_nbytes, space),
            MemoryRegion(self._rows.ctypes.data, self._rows.nbytes),
        ]
        name = f"diptych-{self._instance_id}"
        agent = TransferAgent(
            lambda: NixlBackend(name, kind=space.kind), regions, on_event=self._put, probe=MetadataProbe()
        )
        agent.start()
        return agent

    def _put(self, event: TransferEvent) -> None:
        """On the agent's thread. The byte first: whoever finds the event finds its byte, too."""
        os.write(self._wake_write, b"\0")
        self._events.put(event)

    def _wait_ready(self) -> AgentReady:
        try:
            event = self._events.get(timeout=AGENT_START_S)
        except queue.Empty:
            raise ConfigError(f"the transfer agent did not start within {AGENT_START_S:g} s") from None
        os.read(self._wake_read, 1)
        if isinstance(event, AgentFailed):
            raise event.error
        assert isinstance(event, AgentReady), "the agent's first event says whether it could start"
        return event

    def _site(self, config: TransferConfig, info: EngineInfo, ready: AgentReady) -> Site:
        layout = KVLayout.single_rank(
            info.num_layers,
            info.num_kv_heads,
            head_dim=info.head_dim,
            page_size=info.page_size,
            dtype=info.dtype,
        )
        address = f"{config.peer_host}:{self.network.port}"
        identity = PeerExtension(
            instance_id=self._instance_id,
            layout=LayoutFields.of(layout, info.num_pages),
            model_layers=info.num_layers,
            model_kv_heads=info.num_kv_heads,
            model_fingerprint=info.fingerprint,
            control_endpoint=address,
            num_top_logprobs=MAX_LOGPROBS,
            kv_memory=_kv_space(info).kind.value,
        )
        return Site(
            identity=identity,
            endpoint=config.peer_host,
            port=self.network.port,
            agent_name=ready.name,
            agent_metadata=ready.metadata,
            layout=layout,
            kv_base=info.kv_address,
            kv_space=_kv_space(info),
            handoff_layout=self._handoff,
            handoff_base=self._rows.ctypes.data,
            handoff_rows=HandoffRows(self._handoff, self._rows),
            handoff_slots=HandoffSlots(self._handoff.num_slots),
        )

    def _note(self, event: TransferEvent) -> None:
        if isinstance(event, PeerAdded):
            self._announce(event.peer, carrier_of(self._kind, event.lanes))
        elif isinstance(event, PeerRemoved):
            self._transports.pop(event.peer, None)
        elif isinstance(event, WriteDone):
            self._totals["writes"] += 1
            self._totals["bytes"] += event.nbytes
            self._totals["descriptors"] += event.num_descriptors
            self._transfer_s += event.seconds
            self._announce(event.peer, event.transport)

    def _announce(self, peer: str, transport: str) -> None:
        """Say once what carries the pages: a fall back to TCP costs a factor of ten or more, and nothing else tells.

        Known when a peer is met, by what UCX says, and again from the first large write, by what it did.
        """
        known = self._transports.get(peer)
        if transport == "unknown" or transport == known or (known is not None and known in transport.split(" or ")):
            return
        self._transports[peer] = transport
        if transport != "tcp":
            logger.info("pages to %s go over %s", peer, transport)
        elif self._kind is MemoryKind.VRAM:
            logger.error(
                "PAGES IN GPU MEMORY GO TO %s OVER TCP, hundreds of times slower than they could: %s", peer, HINT
            )
        else:
            logger.warning("pages to %s go over TCP; `diptych doctor --peer` says what would be faster", peer)

    @property
    def _transport(self) -> str:
        """Of all peers together, the slowest first."""
        return "+".join(sorted(set(self._transports.values()), reverse=True)) or "unknown"


def _limits(config: TransferConfig) -> HingeLimits:
    return HingeLimits(
        max_rooms=config.max_rooms,
        room_timeout=config.room_timeout,
        transfer_timeout=config.transfer_timeout,
        heartbeat_interval=config.heartbeat_interval,
        heartbeat_timeout=config.heartbeat_timeout,
        local_prefill_tokens=config.local_prefill_tokens,
        allow_local_prefill=config.local_prefill,
    )


def _kv_space(info: EngineInfo) -> MemorySpace:
    """Where the engine's pool is."""
    kind, _, index = info.device.partition(":")
    return MemorySpace(MemoryKind.VRAM, int(index or 0)) if kind == "cuda" else HOST
