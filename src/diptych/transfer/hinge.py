"""The hinge of one engine: hands what arrives to sender, receiver or peers, and keeps time for all three.

One `tick` a turn of the engine's loop. Foreign bytes are dropped and counted here. Engine thread.
"""

from __future__ import annotations

import logging
import random
from collections import Counter

from diptych.errors import InvariantError
from diptych.transfer.agent import (
    AgentFailed,
    Notified,
    PeerAdded,
    PeerRefused,
    TransferEvent,
    WriteDone,
    WriteFailed,
)
from diptych.transfer.control import (
    CONTROL_GUARD,
    Cancel,
    Control,
    Failed,
    FirstToken,
    Heartbeat,
    Hello,
    HelloReply,
    Joined,
    Leaving,
    Quiesced,
    decode_control,
)
from diptych.transfer.extension import ForeignFrame, OtherVersion
from diptych.transfer.peers import Peer, PeerBook, PeerState
from diptych.transfer.ports import HingeLimits, Network, Site
from diptych.transfer.receiver import Receiver
from diptych.transfer.sender import Sender
from diptych.transfer.wire import Registration, decode_frames

logger = logging.getLogger(__name__)


class Hinge:
    """Both directions of one engine.

    Args: site: what it is and has. network: to its peers. rng: for room numbers.
    """

    def __init__(self, site: Site, network: Network, *, limits: HingeLimits, rng: random.Random) -> None:
        self.foreign_frames: Counter[str] = Counter()
        self.peers = PeerBook(network, site.identity, limits)
        self.sender = Sender(site, self.peers, limits=limits)
        self.receiver = Receiver(site, self.peers, network=network, limits=limits, rng=rng)
        self._site = site
        self._network = network

    def tick(self, now: float, wall_clock: float) -> None:
        """Take what has arrived, send heartbeats, notice who is lost or late. now: monotonic seconds."""
        self.keep_time(now, wall_clock)
        for rank, frames in self._network.receive():
            self._take(frames, now, rank)
        self.peers.beat(now)
        for peer in self.peers.newly_lost(now):
            self._lose(peer, is_dead=self._cannot_have_heard(peer))
        for peer in self.peers.newly_gone(now):
            self._lose(peer, is_dead=True)
        for peer in self.peers.long_silent(now):
            if not (self.sender.rooms_of(peer) or self.receiver.rooms_of(peer)):
                self.peers.forget(peer)
                self._lose(peer, is_dead=True)
        self.sender.expire(now)
        self.receiver.expire()

    def keep_time(self, now: float, wall_clock: float) -> None:
        """What time it is, before events are given."""
        self.receiver.now, self.receiver.wall_clock = now, wall_clock
        self.sender.now = self.peers.complaints.now = now

    def on_event(self, event: TransferEvent, rank: int = 0) -> None:
        """What the agent of one of our ranks says. Raises TransferError if it has broken: the engine cannot go on."""
        match event:
            case PeerAdded() | PeerRefused() | WriteDone() | WriteFailed():
                self.sender.on_event(event, rank)
            case Notified(message=message):
                self.receiver.on_notified(message, rank)
            case AgentFailed(error=error):
                raise error

    def _take(self, frames: list[bytes], now: float, rank: int) -> None:
        try:
            if frames and frames[0] == CONTROL_GUARD:
                self._obey(decode_control(frames), now)
                return
            message = decode_frames(frames)
        except ForeignFrame as error:
            self.foreign_frames[error.reason] += 1
            logger.debug("dropped foreign frames: %s", error)
            return
        if isinstance(message, Registration):
            self.sender.register(message, now, rank=rank)
        else:
            self.sender.join(message, now, rank=rank)

    def _obey(self, control: Control | OtherVersion, now: float) -> None:
        if isinstance(control, OtherVersion):
            self.foreign_frames["version"] += 1
            return
        message = control.message
        if isinstance(message, Hello):
            asker = self.peers.meet(message.identity.control_endpoint, message.identity.instance_id, now)
            if asker.state is not PeerState.GONE:
                self.peers.send(asker, HelloReply(self._site.identity, nonce=message.nonce))
        elif isinstance(message, HelloReply):
            self.receiver.on_hello_reply(message, now)
        peer = self.peers.find(control.instance_id)
        if peer is None:
            self.foreign_frames["instance"] += 1
            return
        if isinstance(message, Heartbeat):
            self.peers.confirmed(peer, message)
        if self.peers.heard(peer, now):
            self.receiver.welcome_back(peer)
        self._act(peer, message)

    def _act(self, peer: Peer, message: object) -> None:
        match message:
            case Cancel(room=room, generation=generation):
                self.sender.cancel_room(peer, room, generation)
            case Joined(room=room, generation=generation):
                self.receiver.on_joined(room, generation)
            case FirstToken():
                self.receiver.on_first_token(message)
            case Failed():
                self.receiver.on_failed(message)
            case Quiesced(room=room, generation=generation):
                self.receiver.on_quiesced(room, generation)
            case Leaving():
                peer.is_leaving = True

    def _cannot_have_heard(self, peer: Peer) -> bool:
        """Whether nothing of what we asked has reached the peer: then it is as good as dead, for it will never write.

        That is so where it has a different cluster key, or was frozen before we met: no connection to it ever opened.
        """
        return not peer.has_answered and self._network.withdraw(peer.address)

    def _lose(self, peer: Peer, *, is_dead: bool) -> None:
        self.sender.lose(peer, is_dead=is_dead)
        self.receiver.lose(peer, is_dead=is_dead)

    def leave(self, timeout_s: float) -> None:
        """Tell every peer that we take no new rooms."""
        for peer in self.peers:
            self.peers.send(peer, Leaving(timeout_s))

    @property
    def is_idle(self) -> bool:
        """Whether no room is open on either side."""
        return not (len(self.sender.rooms) or len(self.receiver.rooms))

    def check(self) -> None:
        """Raise InvariantError if an idle hinge holds handoff rows."""
        slots = self._site.handoff_slots
        if self.is_idle and slots.num_free != slots.num_slots:
            raise InvariantError(f"idle, but {slots.num_slots - slots.num_free} handoff rows are taken")
