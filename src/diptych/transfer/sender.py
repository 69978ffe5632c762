"""The prefill side: joins prompts with destinations by room, and writes pages while the rest is computed. A PageSink.

Owns the rooms that this engine fills. Pages are only read here: they stay the sequence's, pinned while it is SENDING.
Engine thread; knows no sockets and no tensors.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter

import msgspec
import numpy as np

from diptych.core.batch import RowOutput
from diptych.core.request import HandTo, Request
from diptych.core.sequence import Sequence
from diptych.errors import (
    DiptychError,
    PeerIncompatible,
    PeerLost,
    TransferError,
    TransferExpired,
    TransferRejected,
)
from diptych.kv.cache import SequencePages
from diptych.scheduler.ports import Dropped, Sent, SinkNews
from diptych.transfer.agent import PeerAdded, PeerRefused, WriteDone, WriteFailed
from diptych.transfer.backend import HOST, MemorySpace
from diptych.transfer.control import ControlMessage, Failed, FirstToken, HelloReply, Joined, Quiesced
from diptych.transfer.destination import Destination, destination_of
from diptych.transfer.extension import PeerExtension, RoomExtension
from diptych.transfer.handoff import Handoff, handoff_descriptors
from diptych.transfer.outgoing import Outgoing, Reader, Registered
from diptych.transfer.peers import Peer, PeerBook, PeerState
from diptych.transfer.plan import Descriptors, plan
from diptych.transfer.ports import HingeLimits, Mover, Site
from diptych.transfer.rooms import RoomTable
from diptych.transfer.stages import Stage, Stages
from diptych.transfer.state import Event, Transfer
from diptych.transfer.wire import AuxLanded, ChunkLanded, Registration, TransferInfo, encode_notification

logger = logging.getLogger(__name__)


class Sender:
    """Rooms that this engine fills.

    Args: site: this rank. peers: shared with the receiver. mover: moves the bytes. limits: bounds and times.
    now: seconds; the hinge sets it before anything else is called.
    """

    def __init__(self, site: Site, peers: PeerBook, *, mover: Mover, limits: HingeLimits) -> None:
        self.rooms: RoomTable[Outgoing] = RoomTable(limits.max_rooms, max_tombstones=4 * limits.max_rooms)
        self.failures: Counter[str] = Counter()
        self.num_done = 0
        self.now = 0.0
        self._site = site
        self._peers = peers
        self._mover = mover
        self._limits = limits
        self._registered: dict[str, Registered] = {}
        self._write_ids = itertools.count(1)
        self._room_of_write: dict[int, Outgoing] = {}
        self._news: list[SinkNews] = []
        self._requests: list[Request] = []

    # ------------------------------------------------------------------ what peers say

    @property
    def is_idle(self) -> bool:
        """Whether no room is open."""
        return not len(self.rooms)

    def register(self, message: Registration, now: float) -> None:
        """A decode rank introduces itself: meet it, or refuse it with both values named."""
        extension = message.extension
        peer = None
        if isinstance(extension, PeerExtension):
            peer = self._peers.meet(f"{message.endpoint}:{message.port}", extension.instance_id, now)
            if peer.state is PeerState.GONE:
                return
            peer.identity = extension
            self._peers.heard(peer, now)
        try:
            destination = destination_of(
                message, self._site.identity, layout=self._site.layout, handoff=self._site.handoff_layout
            )
        except PeerIncompatible as error:
            address = f"{message.endpoint}:{message.port}"
            text = f"decode rank {address} is refused: {error}"
            self._peers.complaints.say("refused", address, text, level=logging.ERROR)
            self._reply(peer, str(error))
            return
        if message.agent_name not in self._registered:  # ours repeat themselves until they are answered
            self._registered[message.agent_name] = Registered(message.agent_name, destination, peer)
            self._mover.add_peer(message.agent_name, message.agent_metadata)
        self._reply(peer, "")

    def _reply(self, peer: Peer | None, refusal: str) -> None:
        if peer is not None:
            self._peers.send(peer, HelloReply(self._site.identity, refusal))

    def join(self, info: TransferInfo, now: float) -> None:
        """A decode rank names a room: open it, or meet the prompt that waits there."""
        registered = self._registered.get(info.agent_name)
        if registered is None:
            # We may have restarted. Ours repeats registration and transfer info until it hears from us.
            text = f"room {info.room}: {info.agent_name} asks without having registered"
            self._peers.complaints.say("unregistered", f"{info.endpoint}:{info.port}", text)
            return
        if isinstance(info.extension, RoomExtension) and info.extension.to_instance not in ("", self._site.instance_id):
            self._reply(registered.peer, "")  # it was meant for whoever was here before us
            return
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
        if info.agent_name in outgoing.readers:
            return
        extension = info.extension if isinstance(info.extension, RoomExtension) else None
        outgoing.num_readers = info.num_readers
        cached = registered.destination.num_cached_tokens(info)
        outgoing.readers[info.agent_name] = Reader(registered, info, cached, has_all=info.is_dummy)
        if extension is not None:
            outgoing.generation = extension.generation
            if extension.prompt is not None:
                self._order(outgoing, extension, now)
        self._give_time(outgoing, now)
        self._advance(outgoing)

    def _answer(self, registered: Registered, message: ControlMessage) -> None:
        if registered.peer is not None:
            self._peers.send(registered.peer, message)

    def _new_room(self, room: int, now: float) -> Outgoing:
        return Outgoing(Transfer(room), now + self._limits.room_timeout, Stages(now))

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
        if outgoing is None or outgoing.request_id is not None:
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
            for name in [n for n, registered in self._registered.items() if registered.peer is peer]:
                del self._registered[name]
                self._mover.remove_peer(name)

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
            problem = reader.registered.destination.problem(reader.info, sequence.num_prompt_tokens)
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
        template = reader.registered.destination.template
        is_last = outgoing.handoff is not None
        if is_last:
            upto = sequence.num_prompt_tokens
        else:
            confirmed = min(sequence.num_confirmed_tokens, sequence.num_prompt_tokens - 1)
            upto = template.floor(confirmed)
        if upto > reader.num_sent_tokens:
            self._post_chunk(outgoing, reader, pages, range(reader.num_sent_tokens, upto), is_last=is_last)
        if is_last:
            self._post_handoff(outgoing, reader)
            reader.has_all = True

    def _post_chunk(
        self, outgoing: Outgoing, reader: Reader, pages: SequencePages, tokens: range, *, is_last: bool
    ) -> None:
        destination = reader.registered.destination
        descriptors = plan(
            destination.template,
            np.array(pages.pages, dtype=np.int64),
            dst_pages=reader.info.dst_pages.astype(np.int64),
            src_base=self._site.kv_base,
            dst_bases=destination.kv_addresses,
            tokens=tokens,
            dst_first_token=destination.num_cached_tokens(reader.info),
        )
        name = ChunkLanded(outgoing.transfer.room, reader.next_chunk, is_last, self._writer(destination))
        reader.num_sent_tokens = tokens.stop
        reader.next_chunk += 1
        self._post(
            outgoing,
            reader,
            descriptors,
            notification=encode_notification(name),
            source=self._site.kv_space,
            destination=destination.kv_space,
        )

    def _post_handoff(self, outgoing: Outgoing, reader: Reader) -> None:
        destination = reader.registered.destination
        assert outgoing.handoff_slot is not None
        descriptors = handoff_descriptors(
            self._site.handoff_layout,
            self._site.handoff_base,
            src_slot=outgoing.handoff_slot,
            dst_addresses=destination.aux_addresses,
            dst_row_nbytes=destination.aux_row_nbytes,
            dst_slot=reader.info.aux_slot,
        )
        name = AuxLanded(outgoing.transfer.room, self._writer(destination))
        self._post(outgoing, reader, descriptors, notification=encode_notification(name))

    def _writer(self, destination: Destination) -> int | None:
        return None if destination.is_base else self._site.identity.rank

    def _post(
        self,
        outgoing: Outgoing,
        reader: Reader,
        descriptors: Descriptors,
        *,
        notification: bytes,
        source: MemorySpace = HOST,
        destination: MemorySpace = HOST,
    ) -> None:
        write_id = next(self._write_ids)
        outgoing.stages.reach(Stage.FIRST_WRITE, self.now)
        outgoing.write_ids.add(write_id)
        self._room_of_write[write_id] = outgoing
        if outgoing.transfer.expects(Event.STARTED):
            outgoing.transfer.on(Event.STARTED)
        self._mover.write(
            write_id,
            reader.registered.agent_name,
            descriptors=descriptors,
            notification=notification,
            source=source,
            destination=destination,
        )

    def on_event(self, event: PeerAdded | PeerRefused | WriteDone | WriteFailed) -> None:
        """What the mover says."""
        match event:
            case PeerAdded(key=key):
                self._meet(key)
            case PeerRefused(key=key, error=error):
                self._part(key, error)
            case WriteDone(write_id=write_id):
                stages = self._room_of_write[write_id].stages
                stages.add_write(event.nbytes, event.num_descriptors, event.seconds)
                self._end_write(write_id, None)
            case WriteFailed(write_id=write_id, error=error):
                self._end_write(write_id, error)

    def _meet(self, agent_name: str) -> None:
        registered = self._registered.get(agent_name)
        if registered is not None:
            registered.is_ready = True
            for _, outgoing in self.rooms:
                if agent_name in outgoing.readers:
                    self._advance(outgoing)

    def _part(self, agent_name: str, error: TransferError) -> None:
        registered = self._registered.pop(agent_name, None)
        if registered is None:
            return
        # No refusal of the peer for good: it registers anew for its next room, and what was in the way may have passed.
        address = "" if registered.peer is None else registered.peer.address
        text = f"decode agent {agent_name} cannot be met: {error}"
        self._peers.complaints.say("unmet", address, text, level=logging.ERROR)
        for _, outgoing in self.rooms:
            if agent_name in outgoing.readers:
                self._give_up(outgoing, Event.ERRORED, error)

    def _end_write(self, write_id: int, error: TransferError | None) -> None:
        outgoing = self._room_of_write.pop(write_id)
        outgoing.write_ids.remove(write_id)
        if error is not None:
            self._give_up(outgoing, Event.ERRORED, error)
        else:
            self._settle(outgoing)

    # ------------------------------------------------------------------ ends

    def expire(self, now: float) -> None:
        """Give up rooms whose deadline has passed."""
        for room, outgoing in self.rooms:
            if now >= outgoing.deadline and outgoing.transfer.is_live:
                what = "no decode engine named it" if not outgoing.is_joined else "it was not delivered in time"
                if outgoing.request_id is None:
                    what = "no prompt came for it"
                self._give_up(outgoing, Event.EXPIRED, TransferExpired(f"room {room}: {what}"))

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
