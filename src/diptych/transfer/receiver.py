"""The decode side: asks prefill engines for prompts, and follows their pages until they have landed. A PrefillSource.

Owns the rooms that peers fill, and with them the pages in which a write may still land. Engine thread; knows no sockets
and no tensors.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections import Counter

from diptych.core.batch import RowOutput, TokenLogprobs
from diptych.core.request import TakeFrom
from diptych.core.sequence import Sequence
from diptych.errors import DiptychError, PeerIncompatible, PeerLost, RequestError, TransferError, TransferExpired
from diptych.kv.cache import SequencePages
from diptych.scheduler.ports import Begin, GaveUp, Landed, SourceNews
from diptych.scheduler.ports import FirstToken as FirstTokenNews
from diptych.transfer.asking import Asking
from diptych.transfer.control import Cancel, Failed, FirstToken, HelloReply
from diptych.transfer.extension import MAX_ROOM, ForeignFrame, PrefillRequest, RoomExtension
from diptych.transfer.incoming import Incoming, error_of
from diptych.transfer.landing import Landing
from diptych.transfer.peers import Peer, PeerBook
from diptych.transfer.ports import HingeLimits, Network, Site
from diptych.transfer.rooms import RoomTable
from diptych.transfer.stages import Stage, Stages
from diptych.transfer.state import Event, Transfer
from diptych.transfer.wire import decode_notification

logger = logging.getLogger(__name__)

# Seconds until a transfer info is repeated: unanswered, and answered. A room that the peer calls over fails after the
# grace.
FIRST_NUDGE_S = 1.0
NUDGE_S = 5.0
QUIESCED_GRACE_S = 1.0
# Seconds for which requests wait for a peer's first answer; then they are computed here. Until it answers it fills one
# room alone: what it may still write, if it never does, are the pages of one prompt.
FIRST_ANSWER_S = 0.25


class Receiver:
    """Rooms that peers fill for this engine.

    Args: site: this engine. peers: shared with the sender. network: to them. rng: makes room numbers. now: seconds; the
    hinge sets it before anything else is called.
    """

    def __init__(
        self, site: Site, peers: PeerBook, *, network: Network, limits: HingeLimits, rng: random.Random
    ) -> None:
        self.rooms: RoomTable[Incoming] = RoomTable(limits.max_rooms, max_tombstones=4 * limits.max_rooms)
        self.failures: Counter[str] = Counter()
        self.num_done = 0
        self.num_foreign_notifications = 0
        self.now = 0.0
        self.wall_clock = 0.0
        self._site = site
        self._peers = peers
        self._asking = Asking(site, network)
        self._limits = limits
        self._rng = rng
        self._by_sequence: dict[Sequence, Incoming] = {}
        self._tried: weakref.WeakSet[Sequence] = weakref.WeakSet()
        self._news: list[SourceNews] = []
        self._freed: list[int] = []

    # ------------------------------------------------------------------ PrefillSource

    def wants(self, sequence: Sequence) -> bool:
        is_taken = isinstance(sequence.request.handoff, TakeFrom)
        return is_taken and sequence not in self._tried and not sequence.num_output_tokens

    def begin(self, sequence: Sequence, pages: SequencePages) -> Begin:
        handoff = sequence.request.handoff
        if not isinstance(handoff, TakeFrom) or not self.wants(sequence):
            return Begin.HERE
        num_cached = pages.num_leased * self._site.identity.layout.page_size
        num_to_compute = sequence.num_prompt_tokens - num_cached
        if handoff.room is None and num_to_compute <= self._limits.local_prefill_tokens:
            return Begin.HERE
        peer = self._peers.meet(handoff.address, handoff.instance_id, self.now)
        if not peer.is_usable:
            self._tried.add(sequence)
            if self._limits.allow_local_prefill:
                return Begin.HERE
            self._fail_unbegun(sequence, peer)
            return Begin.ELSEWHERE
        if not peer.has_answered and self.rooms_of(peer):
            is_late = self.now - peer.last_heard >= FIRST_ANSWER_S
            return Begin.HERE if is_late and self._limits.allow_local_prefill else Begin.LATER
        slot = self._site.handoff_slots.allocate() if self.rooms.num_free else None
        if slot is None:
            # Rooms that drain may hold theirs for long; then it is not worth waiting.
            will_free = any(incoming.transfer.is_live for _, incoming in self.rooms)
            return Begin.LATER if will_free or not self._limits.allow_local_prefill else Begin.HERE
        self._request(sequence, pages, peer, slot, num_cached)
        return Begin.ELSEWHERE

    def _fail_unbegun(self, sequence: Sequence, peer: Peer) -> None:
        """There is no peer and no prompt may be computed here: it fails before anything has begun."""
        if peer.refusal:
            error: TransferError = PeerIncompatible(peer.refusal)
        else:
            error = PeerLost(f"prefill engine {peer.address} is {peer.state.name.lower()}; try again")
        self._news.append(GaveUp(sequence, error))

    def _request(self, sequence: Sequence, pages: SequencePages, peer: Peer, slot: int, num_cached: int) -> None:
        handoff = sequence.request.handoff
        assert isinstance(handoff, TakeFrom)
        room = self._rng.getrandbits(63) & MAX_ROOM if handoff.room is None else handoff.room
        destination = pages.pages[pages.num_leased :]
        extension = RoomExtension(
            instance_id=self._site.instance_id,
            to_instance=peer.instance_id,
            generation=self._rng.getrandbits(31),
            num_cached_tokens=num_cached,
            adapter=sequence.request.adapter,
            adapter_digest=sequence.request.adapter_digest,
            prompt=PrefillRequest.of(sequence.request, self.wall_clock) if handoff.room is None else None,
        )
        incoming = Incoming(
            transfer=Transfer(room, tuple(destination)),
            sequence=sequence,
            peer=peer,
            handoff_slot=slot,
            generation=extension.generation,
            # A writer sends a chunk for at least one token.
            landing=Landing(None, max_chunks=sequence.num_prompt_tokens),
            info=self._asking.info(room, destination, slot, extension),
            deadline=self.now + self._limits.transfer_timeout,
            next_nudge=self.now + FIRST_NUDGE_S,
            stages=Stages(self.now, queue_s=self.wall_clock - sequence.request.arrival_time),
        )
        try:
            self._expect_streams(incoming)
            self.rooms.open(room, incoming)
        except DiptychError as error:
            self._site.handoff_slots.free(slot)
            self._news.append(GaveUp(sequence, error))
            return
        self._by_sequence[sequence] = incoming
        self._asking.ask(peer, incoming.info)
        self._expect_notifications(True)

    def _expect_streams(self, incoming: Incoming) -> None:
        """Who must write, once the peer has said how it is made. Raises PeerIncompatible if that cannot fill us."""
        streams = self._asking.streams_from(incoming.peer, incoming.room, incoming.group)
        if streams is not None:
            incoming.landing.expect(streams)

    def _expect_notifications(self, is_expecting: bool) -> None:
        for agent in self._site.agents:
            agent.expect(is_expecting)

    def news(self) -> list[SourceNews]:
        news, self._news = self._news, []
        return news

    def keep(self, sequence: Sequence, pages: list[int]) -> None:
        incoming = self._by_sequence.pop(sequence)
        if incoming.transfer.owns_pages:
            incoming.kept_pages = pages
        else:
            self._freed += pages

    def freed_pages(self) -> list[int]:
        freed, self._freed = self._freed, []
        return freed

    def cancel(self, sequence: Sequence) -> None:
        incoming = self._by_sequence.get(sequence)
        if incoming is not None and incoming.transfer.is_live:
            incoming.transfer.on(Event.CANCELLED)
            self._send_cancel(incoming)
            self._let_go(incoming, None)
        elif self.wants(sequence):
            self._decline(sequence)

    def _decline(self, sequence: Sequence) -> None:
        """A request that ends before its room was opened: if a prefill engine was told, too, it waits there.

        We enter without wanting a page, so that nothing can be written, and leave at once.
        """
        handoff = sequence.request.handoff
        assert isinstance(handoff, TakeFrom)
        peer = self._peers.meet(handoff.address, handoff.instance_id, self.now)
        if handoff.room is None or not peer.is_usable:
            return
        extension = RoomExtension(instance_id=self._site.instance_id, to_instance=peer.instance_id)
        self._asking.ask(peer, self._asking.info(handoff.room, [], 0, extension))
        self._peers.send(peer, Cancel(handoff.room, extension.generation))

    # ------------------------------------------------------------------ what peers say

    def on_hello_reply(self, message: HelloReply, now: float) -> None:
        """A prefill engine answers our registration: it may be another instance than we thought, or refuse us."""
        identity = message.identity
        self._peers.answered(message.nonce, identity.instance_id)
        peer = self._peers.find(identity.instance_id)
        if peer is None:
            return
        peer.identity = identity
        peer.refusal = message.refusal or self._asking.problem_with(peer)
        if peer.refusal:
            what = "refuses us" if message.refusal else "cannot be used"
            text = f"prefill engine {peer.address} {what}: {peer.refusal}"
            self._peers.complaints.say("refusal", peer.address, text, level=logging.ERROR)
        for incoming in self.rooms_of(peer):
            if peer.refusal:
                event = Event.REJECTED if message.refusal else Event.ERRORED
                self._fail(incoming, event, PeerIncompatible(peer.refusal))
            elif not incoming.landing.is_expecting:
                self._meet(incoming)

    def _meet(self, incoming: Incoming) -> None:
        """The peer of a room has said who it is."""
        self._expect_streams(incoming)
        if incoming.transfer.is_live:
            self._asking.ask(incoming.peer, incoming.info)  # it may write now: we would notice if it died
        if incoming.landing.is_complete:
            self._land(incoming)

    def on_first_token(self, message: FirstToken) -> None:
        """The peer has sampled: the client need not wait for the KV."""
        incoming = self._current(message.room, message.generation)
        if incoming is None or not incoming.transfer.is_live:
            return
        logprobs = [] if message.logprobs is None else [message.logprobs]
        self._tell(incoming, message.token_id, logprobs, message.prompt_logprobs, message.cached_tokens)

    def on_failed(self, message: Failed) -> None:
        """The peer will not deliver."""
        incoming = self._current(message.room, message.generation)
        if incoming is None:
            return
        error = error_of(message)
        event = Event.ERRORED if message.has_posted else Event.REJECTED
        self._fail(incoming, event, error)

    def on_joined(self, room: int, generation: int) -> None:
        """The peer knows the room."""
        incoming = self._current(room, generation)
        if incoming is not None:
            incoming.is_joined = True
            incoming.stages.reach(Stage.MET, self.now)
            incoming.next_nudge = self.now + NUDGE_S
            if incoming.peer.identity is None:
                self._asking.register_with(incoming.peer)  # its answer to that must have been lost

    def on_quiesced(self, room: int, generation: int) -> None:
        """Nothing more comes. Notifications of what was written may still be on their way, unless it is given up."""
        incoming = self._current(room, generation)
        if incoming is None:
            return
        if incoming.transfer.is_live:
            incoming.is_quiesced = True
            incoming.deadline = min(incoming.deadline, self.now + QUIESCED_GRACE_S)
        else:
            incoming.transfer.on(Event.QUIESCED)
            self._settle(incoming)

    def on_notified(self, name: bytes, rank: int = 0) -> None:
        """A write has landed in the memory of one of our ranks."""
        try:
            notification = decode_notification(name)
            incoming = self.rooms.find(notification.room)
            if incoming is None:
                return
            incoming.landing.add(notification, rank)
        except ForeignFrame as error:
            self.num_foreign_notifications += 1
            self._peers.complaints.say("notification", "", f"dropped a notification: {error}")
            return
        if incoming.transfer.expects(Event.STARTED):
            incoming.transfer.on(Event.STARTED)
            incoming.stages.reach(Stage.FIRST_WRITE, self.now)
        if incoming.landing.is_complete:
            self._land(incoming)

    def _land(self, incoming: Incoming) -> None:
        if incoming.transfer.is_live:
            if not incoming.is_told:
                self._tell_from_handoff(incoming)
            incoming.transfer.on(Event.LANDED)
            self.num_done += 1
            self._news.append(Landed(incoming.sequence))
            self._tried.add(incoming.sequence)
            del self._by_sequence[incoming.sequence]
        else:
            incoming.transfer.on(Event.LANDED)
        self._settle(incoming)

    def _tell_from_handoff(self, incoming: Incoming) -> None:
        """The FirstToken message was lost or is late; the row says the same."""
        sampling = incoming.sequence.request.sampling
        handoff = self._site.handoff_rows.unpack(incoming.handoff_slot, num_top_logprobs=sampling.logprobs)
        logprobs = [handoff.logprobs] if handoff.logprobs is not None and sampling.logprobs is not None else []
        self._tell(incoming, handoff.token_id, logprobs, [], handoff.num_cached_tokens)

    def _tell(
        self,
        incoming: Incoming,
        token_id: int,
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
        num_cached_tokens: int,
    ) -> None:
        if not incoming.is_told:
            incoming.is_told = True
            incoming.stages.reach(Stage.FIRST_TOKEN, self.now)
            row = RowOutput([token_id], logprobs, prompt_logprobs)
            self._news.append(FirstTokenNews(incoming.sequence, row, num_cached_tokens))

    # ------------------------------------------------------------------ ends

    def lose(self, peer: Peer, *, is_dead: bool) -> None:
        """A peer is silent, or dead: its rooms end; if it is dead no write can land any more."""
        for incoming in self.rooms_of(peer):
            if incoming.transfer.is_live:
                self._fail(incoming, Event.PEER_LOST, PeerLost(f"prefill engine {peer.address} is lost"))
            if is_dead and incoming.transfer.owns_pages:
                incoming.transfer.on(Event.QUIESCED)
                self._settle(incoming)
        if is_dead:
            self._asking.forget(peer)

    def welcome_back(self, peer: Peer) -> None:
        """A peer that was silent is heard again: ask once more for the end of what was given up meanwhile."""
        for incoming in self.rooms_of(peer):
            if not incoming.transfer.is_live:
                self._send_cancel(incoming)

    def expire(self) -> None:
        """Remind peers of rooms that they do not answer, give up those whose deadline has passed."""
        for room, incoming in self.rooms:
            if incoming.transfer.is_live and self.now >= incoming.deadline:
                self._fail(incoming, Event.EXPIRED, TransferExpired(f"room {room}: not all of it landed in time"))
            elif self.now >= incoming.next_nudge:
                self._nudge(incoming)

    def _nudge(self, incoming: Incoming) -> None:
        """Say again what we want: the peer may not have heard it, or its answer was lost."""
        if not incoming.transfer.is_live:
            self._send_cancel(incoming)
            return
        has_met = incoming.is_joined and incoming.landing.is_expecting
        incoming.next_nudge = self.now + (NUDGE_S if has_met else FIRST_NUDGE_S)
        if not has_met:
            self._asking.forget(incoming.peer)
        self._asking.ask(incoming.peer, incoming.info)

    def _fail(self, incoming: Incoming, event: Event, error: DiptychError) -> None:
        """Give up a room. The sequence goes on without it at once; its pages may have to wait."""
        if not incoming.transfer.is_live:
            if incoming.transfer.expects(event):
                incoming.transfer.on(event)
            self._settle(incoming)
            return
        if event is Event.REJECTED and not incoming.transfer.expects(event):
            event = Event.ERRORED  # the peer says that it posted nothing, but something has landed
        incoming.transfer.on(event)
        if incoming.is_quiesced:
            incoming.transfer.on(Event.QUIESCED)
        self.failures[event.name] += 1
        logger.warning("room %d: %s", incoming.room, error, extra={"request_id": incoming.sequence.request_id})
        if incoming.transfer.owns_pages:
            self._send_cancel(incoming)
        # The prompt is computed here, unless the request itself was at fault.
        is_final = isinstance(error, RequestError) or not self._limits.allow_local_prefill
        self._let_go(incoming, error if is_final else None)
        self._settle(incoming)

    def _let_go(self, incoming: Incoming, error: DiptychError | None) -> None:
        """Hand the sequence back at once; pages in which a write may still land stay here."""
        self._tried.add(incoming.sequence)
        keeps_pages = incoming.transfer.owns_pages
        self._news.append(GaveUp(incoming.sequence, error, keeps_pages=keeps_pages))
        if not keeps_pages:  # else `keep` will ask for it
            del self._by_sequence[incoming.sequence]

    def _settle(self, incoming: Incoming) -> None:
        """Close a room in which nothing can land any more."""
        if incoming.transfer.owns_pages or self.rooms.peek(incoming.room) is not incoming:
            return
        self.rooms.close(incoming.room)
        cause = incoming.transfer.cause
        line = incoming.stages.line(incoming.room, "done" if cause is None else cause.name.lower(), self.now)
        logger.info("taken over: %s", line, extra={"request_id": incoming.sequence.request_id})
        self._site.handoff_slots.free(incoming.handoff_slot)
        self._freed += incoming.kept_pages
        incoming.kept_pages = []
        if not len(self.rooms):
            self._expect_notifications(False)

    def _send_cancel(self, incoming: Incoming) -> None:
        incoming.next_nudge = self.now + FIRST_NUDGE_S
        self._peers.send(incoming.peer, Cancel(incoming.room, incoming.generation))

    def rooms_of(self, peer: Peer) -> list[Incoming]:
        """Rooms that the peer fills."""
        return [incoming for _, incoming in self.rooms if incoming.peer is peer]

    def _current(self, room: int, generation: int) -> Incoming | None:
        incoming = self.rooms.find(room)
        return incoming if incoming is not None and incoming.generation == generation else None
