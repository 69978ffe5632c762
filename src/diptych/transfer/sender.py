"""The prefill side: joins prompts with destinations by room, and writes pages while the rest is computed. A PageSink.

Owns the rooms that this engine fills. Pages are only read here: they stay the sequence's, pinned while it is SENDING.
Engine thread; knows no sockets and no tensors.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec

from diptych.core.batch import RowOutput
from diptych.core.request import HandTo, Request
from diptych.core.sequence import Sequence
from diptych.errors import (
    DiptychError,
    PeerLost,
    TransferError,
    TransferExpired,
    TransferRejected,
)
from diptych.kv.cache import SequencePages
from diptych.scheduler.ports import Dropped, Sent, SinkNews
from diptych.transfer.agent import PeerAdded, PeerRefused, WriteDone, WriteFailed
from diptych.transfer.control import ControlMessage, Failed, FirstToken, Joined, Quiesced
from diptych.transfer.destination import adapter_problem
from diptych.transfer.extension import RoomExtension
from diptych.transfer.handoff import Handoff
from diptych.transfer.outgoing import Outgoing, Reader
from diptych.transfer.peers import Peer, PeerBook
from diptych.transfer.ports import HingeLimits, Site
from diptych.transfer.posting import Posted, Poster
from diptych.transfer.registrations import Registered, Registrations
from diptych.transfer.rooms import RoomTable
from diptych.transfer.stages import Stage, Stages
from diptych.transfer.state import Event, Transfer
from diptych.transfer.wire import Registration, TransferInfo

logger = logging.getLogger(__name__)


class Sender:
    """Rooms that this engine fills.

    Args: site: this engine; its agents move the bytes. peers: shared with the receiver. limits: bounds and times.
    """

    def __init__(self, site: Site, peers: PeerBook, *, limits: HingeLimits) -> None:
        self.rooms: RoomTable[Outgoing] = RoomTable(limits.max_rooms, max_tombstones=4 * limits.max_rooms)
        self.failures: Counter[str] = Counter()
        self.num_done = 0
        self._site = site
        self._shape = site.shape
        self._peers = peers
        self._limits = limits
        self._registrations = Registrations(site, peers)
        self._poster = Poster(site, limits)
        self._news: list[SinkNews] = []
        self._requests: list[Request] = []

    # ------------------------------------------------------------------ what peers say

    @property
    def now(self) -> float:
        """Seconds; the hinge sets it before anything else is called."""
        return self._poster.now

    @now.setter
    def now(self, now: float) -> None:
        self._poster.now = now

    @property
    def is_idle(self) -> bool:
        """Whether no room is open."""
        return not len(self.rooms)

    def register(self, message: Registration, now: float, *, rank: int = 0) -> None:
        """Somebody introduces himself to a rank of ours: meet him, or refuse him with both values named."""
        self._registrations.register(message, now, rank=rank)

    def join(self, info: TransferInfo, now: float, *, rank: int = 0) -> None:
        """Somebody names a room to a rank of ours: open it, or meet the prompt that waits there."""
        registered = self._registrations.find(info.agent_name, rank)
        if registered is None:
            # We may have restarted. Ours repeats registration and transfer info until it hears from us.
            text = f"room {info.room}: {info.agent_name} asks without having registered"
            self._peers.complaints.say("unregistered", f"{info.endpoint}:{info.port}", text)
            return
        extension = info.extension if isinstance(info.extension, RoomExtension) else None
        if extension is not None and extension.to_instance not in ("", self._site.instance_id):
            self._registrations.greet(registered.peer)  # it was meant for whoever was here before us
            return
        if extension is not None and extension.knows_you and not registered.may_write:
            registered.may_write = True
            self._advance_rooms_of([registered])
        if self.rooms.is_dead(info.room):
            self._answer(registered, Quiesced(info.room, _generation(info)))
            return
        try:
            outgoing = self.rooms.peek(info.room) or self.rooms.open(info.room, self._new_room(info.room, now))
        except DiptychError as error:
            text = f"room {info.room} is refused: {error}"
            self._peers.complaints.say("room", f"{info.endpoint}:{info.port}", text)
            self._answer(registered, _failed(info.room, _generation(info), error, has_posted=False))
            return
        self._answer(registered, Joined(info.room, _generation(info)))
        if (registered.rank, info.agent_name) not in outgoing.readers:
            self._add_reader(outgoing, registered, info, now)

    def _add_reader(self, outgoing: Outgoing, registered: Registered, info: TransferInfo, now: float) -> None:
        destination = registered.destination
        cached = destination.num_cached_tokens(info)
        outgoing.readers[registered.rank, info.agent_name] = Reader(registered, info, cached, has_all=info.is_dummy)
        if destination.is_base and not outgoing.missing:
            # Its ranks share ours among themselves, and each tells every rank of ours what it wants of it.
            addressed = {member % self._shape.tp_size for member in self._shape.members(outgoing.group)}
            outgoing.missing = dict.fromkeys(addressed, info.num_readers)
        if destination.is_base and destination.tp_rank in outgoing.missing:
            here = sum(r.registered.destination.tp_rank == destination.tp_rank for r in outgoing.readers.values())
            outgoing.missing[destination.tp_rank] = info.num_readers - here
        if isinstance(info.extension, RoomExtension):
            outgoing.generation = info.extension.generation
            if info.extension.prompt is not None:
                self._order(outgoing, info.extension, now)
        self._give_time(outgoing, now)
        self._advance(outgoing)

    def _answer(self, registered: Registered, message: ControlMessage) -> None:
        if registered.peer is not None:
            self._peers.send(registered.peer, message)

    def _new_room(self, room: int, now: float) -> Outgoing:
        group = self._shape.group_of(room)
        return Outgoing(Transfer(room), now + self._limits.room_timeout, Stages(now), group=group)

    def _order(self, outgoing: Outgoing, extension: RoomExtension, now: float) -> None:
        """Decode drives: the prompt came along, and becomes a request of this engine."""
        prompt = extension.prompt
        assert prompt is not None
        room = outgoing.transfer.room
        outgoing.request_id = f"{extension.instance_id}/{room}/{prompt.request_id}"
        request = msgspec.structs.replace(prompt.request(now), request_id=outgoing.request_id, handoff=HandTo(room))
        self._requests.append(request)

    def _give_time(self, outgoing: Outgoing, now: float) -> None:
        """A side that waits alone gets less than two that have met."""
        has_met = outgoing.request_id is not None and outgoing.is_joined
        if has_met:
            outgoing.stages.reach(Stage.MET, now)
        outgoing.deadline = now + (self._limits.transfer_timeout if has_met else self._limits.room_timeout)

    def take_requests(self) -> list[Request]:
        """Prompts that peers have sent since the last call; each is to be scheduled, or refused with `refuse`."""
        requests, self._requests = self._requests, []
        return requests

    def refuse(self, request: Request, error: DiptychError) -> None:
        """The engine will not compute this prompt."""
        assert isinstance(request.handoff, HandTo)
        outgoing = self.rooms.find(request.handoff.room)
        if outgoing is not None and outgoing.request_id == request.request_id:
            outgoing.request_id = None
            self._give_up(outgoing, Event.ERRORED, error)

    def expect(self, request: Request, now: float) -> None:
        """Both are told: this request's prompt meets its destination in a room. Raises RoomTaken, Overloaded."""
        assert isinstance(request.handoff, HandTo)
        room = request.handoff.room
        outgoing = self.rooms.find(room)
        if outgoing is None or outgoing.request_id is not None or not outgoing.transfer.is_live:
            outgoing = self.rooms.open(room, self._new_room(room, now))
        outgoing.request_id = request.request_id
        self._give_time(outgoing, now)

    def cancel_room(self, peer: Peer, room: int, generation: int) -> None:
        """Decode no longer wants the room. Always ends in a Quiesced, be the room unknown, over or full of writes."""
        outgoing = self.rooms.find(room)
        if outgoing is None or all(reader.registered.peer is not peer for reader in outgoing.readers.values()):
            self._peers.send(peer, Quiesced(room, generation))
            return
        self._give_up(outgoing, Event.CANCELLED, None)

    def rooms_of(self, peer: Peer) -> list[Outgoing]:
        """Rooms that the peer reads."""
        return [o for _, o in self.rooms if any(r.registered.peer is peer for r in o.readers.values())]

    def lose(self, peer: Peer, *, is_dead: bool) -> None:
        """A peer is lost or gone: its rooms end, and it is forgotten if it is dead."""
        for outgoing in self.rooms_of(peer):
            self._give_up(outgoing, Event.PEER_LOST, PeerLost(f"decode engine {peer.address} is lost"))
        if is_dead:
            self._registrations.forget(peer)

    # ------------------------------------------------------------------ PageSink

    def wants(self, sequence: Sequence) -> bool:
        return isinstance(sequence.request.handoff, HandTo)

    def computed(self, sequence: Sequence, pages: SequencePages) -> None:
        outgoing = self._of(sequence)
        if outgoing is not None:
            outgoing.sequence, outgoing.pages = sequence, pages
            # After the prompt's last chunk `sampled` follows at once: the first token leaves before its pages do.
            if sequence.num_confirmed_tokens < sequence.num_prompt_tokens:
                self._advance(outgoing)

    def sampled(self, sequence: Sequence, row: RowOutput) -> None:
        outgoing = self._of(sequence)
        if outgoing is None:
            # Given up meanwhile; nobody reads its pages.
            self._news.append(Sent(sequence, TransferRejected("the room was given up")))
            return
        outgoing.is_sending = True
        outgoing.stages.reach(Stage.FIRST_TOKEN, self.now)
        outgoing.handoff = Handoff(
            token_id=row.token_ids[0],
            num_cached_tokens=sequence.num_cached_tokens,
            logprobs=row.logprobs[0] if row.logprobs else None,
        )
        message = FirstToken(
            room=outgoing.transfer.room,
            generation=outgoing.generation,
            token_id=row.token_ids[0],
            cached_tokens=sequence.num_cached_tokens,
            logprobs=row.logprobs[0] if row.logprobs else None,
            prompt_logprobs=sequence.prompt_logprobs,
        )
        for reader in outgoing.readers.values():
            self._answer(reader.registered, message)
        self._advance(outgoing)

    def is_reading(self, sequence: Sequence) -> bool:
        outgoing = self._of(sequence)
        return outgoing is not None and bool(outgoing.write_ids)

    def news(self) -> list[SinkNews]:
        news, self._news = self._news, []
        return news

    def cancel(self, sequence: Sequence) -> None:
        outgoing = self._of(sequence)
        if outgoing is not None:
            self._give_up(outgoing, Event.CANCELLED, TransferRejected("the prefill engine ended the request"))

    def _of(self, sequence: Sequence) -> Outgoing | None:
        """The open room of a sequence, if it still fills it."""
        handoff = sequence.request.handoff
        outgoing = self.rooms.find(handoff.room) if isinstance(handoff, HandTo) else None
        return outgoing if outgoing is not None and outgoing.request_id == sequence.request_id else None

    # ------------------------------------------------------------------ writing

    def _advance(self, outgoing: Outgoing) -> None:
        """Post what can be posted now: whole pages of the prompt, and at its end the rest and the handoff state."""
        sequence, pages = outgoing.sequence, outgoing.pages
        if not (outgoing.is_joined and outgoing.transfer.is_live and sequence is not None and pages is not None):
            return
        if outgoing.handoff is not None and outgoing.handoff_slot is None and not self._take_slot(outgoing):
            return
        for reader in outgoing.readers.values():
            if not reader.registered.is_ready or (reader.has_all and not reader.info.is_dummy):
                continue
            destination = reader.registered.destination
            problem = adapter_problem(reader.info, sequence.request)
            problem = problem or destination.problem(reader.info, sequence.num_prompt_tokens, src_group=outgoing.group)
            if problem is not None:
                self._give_up(outgoing, Event.ERRORED, TransferRejected(problem))
                return
            self._serve(outgoing, reader, sequence, pages)
        self._settle(outgoing)

    def _take_slot(self, outgoing: Outgoing) -> bool:
        """Pack the handoff state into a row; False while all rows are taken: the room waits for one."""
        slot = self._site.handoff_slots.allocate()
        if slot is None:
            return False
        outgoing.handoff_slot = slot
        handoff = outgoing.handoff
        assert handoff is not None
        is_base = any(reader.registered.destination.is_base for reader in outgoing.readers.values())
        self._site.handoff_rows.pack(slot, handoff.as_base() if is_base else handoff)
        return True

    def _serve(self, outgoing: Outgoing, reader: Reader, sequence: Sequence, pages: SequencePages) -> None:
        """Post the next chunk for one destination; what completes the prompt waits for the first token."""
        if reader.info.is_dummy:
            return
        streams = reader.registered.destination.streams_of(reader.info, outgoing.group)
        is_last = outgoing.handoff is not None
        if is_last:
            upto = sequence.num_prompt_tokens
        else:
            confirmed = min(sequence.num_confirmed_tokens, sequence.num_prompt_tokens - 1)
            upto = streams[0].template.floor(confirmed)  # all ranks of an engine have pages of one size
        if upto > reader.num_sent_tokens:
            tokens = range(reader.num_sent_tokens, upto)
            self._poster.post_chunk(outgoing, reader, pages, tokens, is_last=is_last)
        if is_last:
            self._poster.post_handoff(outgoing, reader)
            reader.has_all = True

    def on_event(self, event: PeerAdded | PeerRefused | WriteDone | WriteFailed, rank: int = 0) -> None:
        """What the agent of one of our ranks says."""
        match event:
            case PeerAdded(key=key):
                self._advance_rooms_of(self._registrations.met(key, rank))
            case PeerRefused(key=key, error=error):
                for registered in self._registrations.refused(key, error, rank=rank):
                    for outgoing in self._reading(registered):
                        self._give_up(outgoing, Event.ERRORED, error)
            case WriteDone(write_id=write_id):
                outgoing = self._poster.end(write_id)
                outgoing.stages.add_write(event.nbytes, event.num_descriptors, event.seconds)
                self._settle(outgoing)
            case WriteFailed(write_id=write_id, error=error):
                self._give_up(self._poster.end(write_id), Event.ERRORED, error)

    def _advance_rooms_of(self, readers: list[Registered]) -> None:
        for registered in readers:
            if registered.is_ready:
                for outgoing in self._reading(registered):
                    self._advance(outgoing)

    def _reading(self, registered: Registered) -> list[Outgoing]:
        return [o for _, o in self.rooms if (registered.rank, registered.agent_name) in o.readers]

    # ------------------------------------------------------------------ ends

    def expire(self, now: float) -> None:
        """Give up rooms whose deadline has passed."""
        for room, outgoing in self.rooms:
            if now >= outgoing.deadline and outgoing.transfer.is_live:
                what = "no decode engine named it" if not outgoing.is_joined else "it was not delivered in time"
                if outgoing.request_id is None:
                    what = "no prompt came for it"
                self._give_up(outgoing, Event.EXPIRED, TransferExpired(f"room {room}: {what}"))
        for posted in self._poster.overdue():
            self._abandon(posted)

    def _abandon(self, posted: Posted) -> None:
        """A write does not end: its room fails, and stays open until it does, or until the process is dead.

        Nobody waits for that here. Our pages may be used again: whatever a late write carries, the peer keeps the pages
        it goes to until we say that nothing lands any more.
        """
        outgoing, write = posted.outgoing, posted.write
        error = TransferError(
            f"room {outgoing.transfer.room}: a write of {write.descriptors.total_nbytes} bytes in"
            f" {len(write.descriptors)} pieces from rank {posted.rank} to {write.peer} has not ended within"
            f" {posted.limit_s:.1f} s (write_timeout); is the peer's agent alive?"
        )
        logger.error("%s", error, extra={"request_id": outgoing.request_id})
        self._give_up(outgoing, Event.ERRORED, error)
        if outgoing.is_sending and outgoing.sequence is not None:
            self._news.append(Sent(outgoing.sequence, outgoing.error))
        outgoing.is_sending, outgoing.request_id = False, None

    def _give_up(self, outgoing: Outgoing, event: Event, error: DiptychError | None) -> None:
        """End a room; it closes when no write is in flight. Whoever speaks our extension learns both."""
        if outgoing.transfer.is_live:
            outgoing.error = error
            outgoing.transfer.on(event)
            self.failures[event.name] += 1
            self._tell_failure(outgoing, event)
            if not outgoing.is_sending and outgoing.request_id is not None:
                self._news.append(Dropped(outgoing.request_id, error))
        self._settle(outgoing)

    def _tell_failure(self, outgoing: Outgoing, event: Event) -> None:
        if outgoing.error is None:
            return  # a cancel is answered by the Quiesced alone
        room, generation, error = outgoing.transfer.room, outgoing.generation, outgoing.error
        for reader in outgoing.readers.values():
            if event is not Event.PEER_LOST:
                failed = _failed(room, generation, error, has_posted=bool(reader.next_chunk))
                self._answer(reader.registered, failed)

    def _settle(self, outgoing: Outgoing) -> None:
        """Close a room in which nothing is left to post and nothing is in flight."""
        transfer = outgoing.transfer
        if outgoing.write_ids or self.rooms.peek(transfer.room) is not outgoing:
            return
        if transfer.is_live:
            if not (outgoing.handoff_slot is not None and all(r.has_all for r in outgoing.readers.values())):
                return
            transfer.on(Event.LANDED)
            self.num_done += 1
        else:
            transfer.on(Event.QUIESCED)
        for reader in outgoing.readers.values():
            self._answer(reader.registered, Quiesced(transfer.room, outgoing.generation))
        self.rooms.close(transfer.room)
        outcome = "done" if transfer.cause is None else transfer.cause.name.lower()
        line = outgoing.stages.line(transfer.room, outcome, self.now)
        logger.info("handed over: %s", line, extra={"request_id": outgoing.request_id})
        if outgoing.handoff_slot is not None:
            self._site.handoff_slots.free(outgoing.handoff_slot)
            self._retry_waiting()
        if outgoing.is_sending and outgoing.sequence is not None:
            self._news.append(Sent(outgoing.sequence, outgoing.error))

    def _retry_waiting(self) -> None:
        """A handoff row is free: rooms that waited for one go on."""
        for _, outgoing in self.rooms:
            if outgoing.handoff is not None and outgoing.handoff_slot is None:
                self._advance(outgoing)
                return


def _generation(info: TransferInfo) -> int:
    return info.extension.generation if isinstance(info.extension, RoomExtension) else 0


def _failed(room: int, generation: int, error: DiptychError, *, has_posted: bool) -> Failed:
    return Failed(
        room=room,
        generation=generation,
        kind=type(error).__name__,
        message=str(error)[:4096],
        has_posted=has_posted,
    )
