"""The engines we deal with: who is alive, by heartbeats, and who is dead, by proof.

Silence makes a peer LOST, and so does deafness: that it speaks, but confirms none of our heartbeats. Nothing new goes
there, and its transfers are given up, but it may only be frozen, so pages that it may still write stay in quarantine.
Proof of death (its port is refused, or another instance answers there) makes it GONE. Knows no rooms; a base peer has
no heartbeat and is never listed here.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from diptych.transfer.complaints import Complaints
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
    LOST = "silent, or deaf to us, for too long; it may come back"
    GONE = "dead, or replaced by another instance"


@dataclass(slots=True, eq=False)
class Peer:
    """One instance of an engine at one address. last_heard: when it was met, until it has answered once. has_ended: its
    engine's process is dead; those of its ranks may end a moment later. refusal: why no KV moves, if so. num_sent:
    heartbeats to it; num_confirmed: those that it has said to have seen; num_seen: the last one from it. nonce: of the
    last Hello sent for it.
    """

    address: str
    instance_id: str
    last_heard: float
    state: PeerState = PeerState.MEETING
    has_answered: bool = False
    has_ended: bool = False
    identity: PeerExtension | None = None
    refusal: str = ""
    is_leaving: bool = False
    num_sent: int = 0
    num_confirmed: int = 0
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
    dead. complaints: what is to be said of them.
    """

    def __init__(self, network: Network, identity: PeerExtension, limits: HingeLimits) -> None:
        self.complaints = Complaints(logger)
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
                self.complaints.say("too many", address, f"peer {address} is not met: {MAX_PEERS} are known already")
                return Peer(address, instance_id, now, PeerState.GONE)
            peer = self._by_instance[instance_id] = Peer(address, instance_id, now)
        return peer

    def answered(self, nonce: int, instance_id: str) -> None:
        """A Hello was answered: the engine that it was sent for is dead if the answer comes from somebody else."""
        for peer in self:
            if nonce and peer.nonce == nonce and peer.instance_id != instance_id:
                self._end(peer)

    def heard(self, peer: Peer, now: float) -> bool:
        """Note a sign of life; whether it had been taken for lost, and is back."""
        if not peer.has_answered:
            peer.num_confirmed, peer.has_answered = peer.num_sent, True
        peer.last_heard = now
        was_lost = peer.state is PeerState.LOST
        if was_lost and self._is_deaf(peer):
            return False
        if was_lost:
            logger.info("peer %s (%s) is back", peer.address, peer.instance_id)
        peer.state = PeerState.HEALTHY
        return was_lost

    def confirmed(self, peer: Peer, heartbeat: Heartbeat) -> None:
        """A peer says which of our heartbeats it has seen; before `heard`."""
        peer.num_seen = heartbeat.sequence
        peer.num_confirmed = min(max(peer.num_confirmed, heartbeat.seen), peer.num_sent)

    def _is_deaf(self, peer: Peer) -> bool:
        """Whether too many of our heartbeats are unconfirmed. Counted, not timed: while we are frozen we send none."""
        limit = self._limits.heartbeat_timeout / self._limits.heartbeat_interval
        return peer.has_answered and peer.num_sent - peer.num_confirmed > limit

    def _end(self, peer: Peer) -> None:
        """Its engine's process is dead: so is the peer, once all of its ranks are."""
        peer.has_ended = True
        lifelines = [] if peer.identity is None else peer.identity.lifelines
        if all(self._network.is_refused(lifeline) for lifeline in lifelines):
            self.bury(peer)

    def bury(self, peer: Peer) -> None:
        """It is dead; it will be among the next `newly_gone`."""
        if peer.state is PeerState.GONE:
            return
        self.complaints.say(
            "gone", peer.address, f"peer {peer.address} ({peer.instance_id}) is gone", level=logging.INFO
        )
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
        logger.debug("peer %s (%s) is forgotten", peer.address, peer.instance_id)
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
        """Peers that have just been silent, or deaf, for too long."""
        lost = []
        for peer in self:
            silence_s = now - peer.last_heard
            is_silent = silence_s > self._limits.heartbeat_timeout
            if peer.state is not PeerState.LOST and (is_silent or self._is_deaf(peer)):
                what = f"is silent for {silence_s:.1f} s" if is_silent else "does not hear us"
                self.complaints.say("lost", peer.address, f"peer {peer.address} ({peer.instance_id}) {what}")
                peer.state = PeerState.LOST
                lost.append(peer)
        return lost

    def newly_gone(self, now: float) -> list[Peer]:
        """Peers whose death has just become certain: lost ones are probed, a few times a second.

        Either nobody listens there any more, or whoever does answers the Hello with another instance id. And nobody
        listens at the lifelines of its ranks, which have processes of their own.
        """
        for peer in self:
            if peer.state is PeerState.LOST and now >= peer.next_probe:
                peer.next_probe = now + self._limits.heartbeat_interval
                if peer.has_ended or self._network.is_refused(peer.address):
                    self._end(peer)
                else:
                    peer.nonce = next(self._nonces)
                    self.send(peer, Hello(self._identity, peer.nonce))
        gone, self._gone = self._gone, []
        return gone
