"""The engines we deal with: who is alive, by heartbeats, and who is dead, by proof.

Silence makes a peer LOST: nothing new goes there, and its transfers are given up, but it may only be frozen, so pages
that it may still write stay in quarantine. Proof of death (its port is refused, or another instance answers there)
makes it GONE. Knows no rooms; a base peer, which has no heartbeat, is never listed here.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from diptych.transfer.control import ControlMessage, Heartbeat, Hello, encode_control
from diptych.transfer.extension import PeerExtension
from diptych.transfer.ports import HingeLimits, Network

logger = logging.getLogger(__name__)

MAX_PEERS = 256
MAX_DEAD_INSTANCES = 1024
# Seconds of silence after which a peer that is in no room is forgotten; if it comes back it is met anew.
FORGET_S = 60.0


class PeerState(enum.Enum):
    """What we know of a peer's life."""

    MEETING = "we have written to it, it has not answered yet"
    HEALTHY = "it is heard from"
    LOST = "silent for too long; it may come back"
    GONE = "dead, or replaced by another instance"


@dataclass(slots=True, eq=False)
class Peer:
    """One instance of an engine at one address. refusal: why no KV moves, if so. nonce: of the last Hello sent for
    it.
    """

    address: str
    instance_id: str
    last_heard: float
    state: PeerState = PeerState.MEETING
    identity: PeerExtension | None = None
    refusal: str = ""
    is_leaving: bool = False
    num_sent: int = 0
    num_seen: int = 0
    next_beat: float = 0.0
    next_probe: float = 0.0
    nonce: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether new rooms may go there."""
        return self.state in (PeerState.MEETING, PeerState.HEALTHY) and not (self.refusal or self.is_leaving)


class PeerBook:
    """Peers by instance id. Several may be known at one address; evidence, not order of arrival, says which are
    dead.
    """

    def __init__(self, network: Network, identity: PeerExtension, limits: HingeLimits) -> None:
        self._network = network
        self._identity = identity
        self._limits = limits
        self._by_instance: dict[str, Peer] = {}
        self._gone: list[Peer] = []
        self._dead_instances: dict[str, None] = {}  # in order of death
        self._nonces = itertools.count(1)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_instance.values()))

    def find(self, instance_id: str) -> Peer | None:
        """The peer with this instance id, if we know one and it is not dead."""
        return self._by_instance.get(instance_id)

    def meet(self, address: str, instance_id: str, now: float) -> Peer:
        """The peer with this instance id; GONE if it is dead (this is old news), or if there are too many."""
        if instance_id in self._dead_instances:
            return Peer(address, instance_id, now, PeerState.GONE)
        peer = self._by_instance.get(instance_id)
        if peer is None:
            if len(self._by_instance) >= MAX_PEERS:
                logger.warning("peer %s (%s) is not met: %d are known already", address, instance_id, MAX_PEERS)
                return Peer(address, instance_id, now, PeerState.GONE)
            peer = self._by_instance[instance_id] = Peer(address, instance_id, now)
        return peer

    def answered(self, nonce: int, instance_id: str) -> None:
        """A Hello was answered: the peer that it was sent for is dead if the answer comes from somebody else."""
        for peer in self:
            if nonce and peer.nonce == nonce and peer.instance_id != instance_id:
                self.bury(peer)

    def heard(self, peer: Peer, now: float) -> bool:
        """Note a sign of life; whether it had been taken for lost."""
        was_lost = peer.state is PeerState.LOST
        if was_lost:
            logger.info("peer %s (%s) is back", peer.address, peer.instance_id)
        peer.last_heard, peer.state = now, PeerState.HEALTHY
        return was_lost

    def bury(self, peer: Peer) -> None:
        """It is dead; it will be among the next `newly_gone`."""
        if peer.state is PeerState.GONE:
            return
        logger.info("peer %s (%s) is gone", peer.address, peer.instance_id)
        peer.state = PeerState.GONE
        del self._by_instance[peer.instance_id]
        self._gone.append(peer)
        self._dead_instances[peer.instance_id] = None
        if len(self._dead_instances) > MAX_DEAD_INSTANCES:
            del self._dead_instances[next(iter(self._dead_instances))]
        if all(other.address != peer.address for other in self):
            self._network.forget(peer.address)

    def forget(self, peer: Peer) -> None:
        """Strike a peer off without proof of its death; nothing may depend on it."""
        logger.info("peer %s (%s) is forgotten", peer.address, peer.instance_id)
        peer.state = PeerState.GONE
        del self._by_instance[peer.instance_id]
        if all(other.address != peer.address for other in self):
            self._network.forget(peer.address)

    def long_silent(self, now: float) -> list[Peer]:
        """Peers that may be forgotten if they are in no room."""
        return [peer for peer in self if peer.state is PeerState.LOST and now - peer.last_heard > FORGET_S]

    def send(self, peer: Peer, message: ControlMessage) -> None:
        """Send a control message."""
        self._network.send(peer.address, encode_control(message, self._identity.instance_id))

    def beat(self, now: float) -> None:
        """Send the heartbeats that are due."""
        for peer in self:
            if now >= peer.next_beat:
                peer.next_beat = now + self._limits.heartbeat_interval
                peer.num_sent += 1
                self.send(peer, Heartbeat(sequence=peer.num_sent, seen=peer.num_seen))

    def newly_lost(self, now: float) -> list[Peer]:
        """Peers that have just been silent for too long."""
        lost = []
        for peer in self:
            if peer.state is not PeerState.LOST and now - peer.last_heard > self._limits.heartbeat_timeout:
                logger.warning(
                    "peer %s (%s) is silent for %.1f s", peer.address, peer.instance_id, now - peer.last_heard
                )
                peer.state = PeerState.LOST
                lost.append(peer)
        return lost

    def newly_gone(self, now: float) -> list[Peer]:
        """Peers whose death has just become certain: lost ones are probed, a few times a second.

        Either nobody listens there any more, or whoever does answers the Hello with another instance id.
        """
        for peer in self:
            if peer.state is PeerState.LOST and now >= peer.next_probe:
                peer.next_probe = now + self._limits.heartbeat_interval
                if self._network.is_refused(peer.address):
                    self.bury(peer)
                else:
                    peer.nonce = next(self._nonces)
                    self.send(peer, Hello(self._identity, peer.nonce))
        gone, self._gone = self._gone, []
        return gone
