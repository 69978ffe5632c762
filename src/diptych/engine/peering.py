"""Joins an engine to its peers: control sockets, the transfer agents of its ranks, handoff rows, and the hinge over
them.

Built once the workers have their pools; the engine's loop gives it a turn before each plan. Engine thread. Never
imports torch.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable

from diptych.config import ParallelConfig, TransferConfig
from diptych.core.messages import EngineInfo, TransferLoad
from diptych.core.request import MAX_LOGPROBS, HandTo, Request
from diptych.engine.agents import AgentChannel, start_agents
from diptych.engine.rank_agent import memory_space
from diptych.engine.site import facts_of, identity_of, site_of
from diptych.errors import DiptychError, Unavailable
from diptych.transfer.agent import PeerAdded, PeerRemoved, TransferEvent, WriteDone
from diptych.transfer.backend import MemoryKind
from diptych.transfer.handoff import HandoffLayout
from diptych.transfer.hinge import Hinge
from diptych.transfer.peers import PeerState
from diptych.transfer.ports import HingeLimits
from diptych.transfer.sockets import ZmqNetwork
from diptych.transfer.ucx import carrier_of

logger = logging.getLogger(__name__)

HINT = (
    "do both processes see the same GPUs (cuda_ipc) or an RDMA device, is a UCX_* variable set, is the KV pool made of "
    "expandable segments?"
)


class Peering:
    """One engine's face to its peers.

    Args: config: resolved. info: of the loaded workers; their pools are registered. role: what is advertised. parallel:
    its sizes. channel: to the ranks' processes, if there are any. Raises ConfigError if sockets or NIXL cannot be had.
    """

    def __init__(
        self,
        config: TransferConfig,
        info: EngineInfo,
        *,
        role: str,
        parallel: ParallelConfig,
        channel: AgentChannel | None = None,
    ) -> None:
        instance_id = uuid.uuid4().hex
        handoff = HandoffLayout(num_slots=config.max_rooms, num_top_logprobs=MAX_LOGPROBS, hidden_nbytes=0)
        self.network = ZmqNetwork(
            config.peer_host, config.peer_port, cluster_key=config.cluster_key, num_ranks=parallel.world_size
        )
        try:
            self._agents = start_agents(
                f"diptych-{instance_id}", info, rows_nbytes=handoff.nbytes, host=config.peer_host, channel=channel
            )
        except DiptychError:
            self.network.close()
            raise
        host, ports = config.peer_host, self.network.ports
        identity = identity_of(instance_id, info, parallel, self._agents.lifelines, f"{host}:{ports[0]}")
        site = site_of(identity, self._agents, host=host, port=ports[0], handoff=handoff)
        self.hinge = Hinge(site, self.network, limits=_limits(config), rng=random.SystemRandom())
        self.facts = facts_of(identity, role=role, host=host, ports=ports)
        self._totals: Counter[str] = Counter()
        self._transfer_s = 0.0
        self._transports: dict[str, str] = {}  # by agent
        self._kind = memory_space(info.device).kind

    @property
    def wake_fds(self) -> tuple[object, ...]:
        """What the engine's loop waits for: the control sockets, and the agents' events."""
        return (*self.network.inboxes, self._agents.wake_fd)

    def turn(self, admit: Callable[[Request], None], *, refusal: str | None) -> None:
        """Take what peers and the agent say, and have the prompts that peers send scheduled.

        Args: admit: schedules one. refusal: why their prompts are not taken now, if so.
        """
        now, wall_clock = time.monotonic(), time.time()
        self.hinge.keep_time(now, wall_clock)
        for rank, event in self._agents.events():
            self._note(event)
            self.hinge.on_event(event, rank)
        self.hinge.tick(now, wall_clock)
        for request in self.hinge.sender.take_requests():
            try:
                if refusal is not None:
                    raise Unavailable(f"the prefill engine takes no prompts: {refusal}")
                admit(request)
            except DiptychError as error:
                self.hinge.sender.refuse(request, error)

    def add(self, request: Request, admit: Callable[[Request], None]) -> None:
        """Have a request that the server sent scheduled, meeting its room if it has one. Raises what refuses it."""
        if not isinstance(request.handoff, HandTo):
            admit(request)
            return
        self.hinge.sender.expect(request, time.monotonic())
        try:
            admit(request)
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
        """End the agents and close the sockets."""
        self._agents.close()
        self.network.close()

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
        write_timeout=config.write_timeout,
        heartbeat_interval=config.heartbeat_interval,
        heartbeat_timeout=config.heartbeat_timeout,
        local_prefill_tokens=config.local_prefill_tokens,
        allow_local_prefill=config.local_prefill,
    )
