"""Posts the writes of a room, from every rank that holds a part of it, and watches that they end.

Owns which writes are in flight, for how long they may be, and whose room they are for. Engine thread; knows no control
messages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from diptych.kv.cache import SequencePages
from diptych.transfer.backend import Write
from diptych.transfer.destination import Stream
from diptych.transfer.handoff import handoff_descriptors
from diptych.transfer.outgoing import Outgoing, Reader
from diptych.transfer.plan import plan
from diptych.transfer.ports import HingeLimits, Site
from diptych.transfer.ranks import HANDOFF_RANK
from diptych.transfer.stages import Stage
from diptych.transfer.state import Event
from diptych.transfer.wire import AuxLanded, ChunkLanded, encode_notification

# What a working transport is always faster than: UCX over TCP moves 400 MB/s, a descriptor takes 10 us.
FLOOR_BYTES_PER_S = 50e6
FLOOR_DESCRIPTOR_S = 100e-6


@dataclass(slots=True, eq=False)
class Posted:
    """A write that has not ended. cost_s: what it may take; limit_s: from posting, with all that was in the queue."""

    outgoing: Outgoing
    rank: int
    write: Write
    cost_s: float
    limit_s: float
    deadline: float


class Poster:
    """One engine's writes. now: seconds; set before anything else is called."""

    def __init__(self, site: Site, limits: HingeLimits) -> None:
        self.now = 0.0
        self._site = site
        self._limits = limits
        self._ids = itertools.count(1)
        self._posted: dict[int, Posted] = {}
        self._queued_s: dict[int, float] = {}

    def post_chunk(
        self, outgoing: Outgoing, reader: Reader, pages: SequencePages, tokens: range, *, is_last: bool
    ) -> None:
        """Write the KV of `tokens` from all ranks that hold a part to all that need it."""
        destination = reader.registered.destination
        streams = destination.streams_of(reader.info, outgoing.group)
        src_pages = np.array(pages.pages, dtype=np.int64)
        for index, stream in enumerate(streams):
            descriptors = plan(
                stream.template,
                src_pages,
                dst_pages=reader.info.dst_pages.astype(np.int64),
                src_base=self._site.ranks[stream.rank].kv_base,
                dst_bases=stream.kv_addresses,
                tokens=tokens,
                dst_first_token=destination.num_cached_tokens(reader.info),
            )
            landed = _landed(outgoing, reader, stream, index, len(streams), is_last)
            write = Write(
                peer=stream.agent,
                descriptors=descriptors,
                notification=encode_notification(landed),
                source=self._site.ranks[stream.rank].kv_space,
                destination=stream.kv_space,
            )
            self._post(outgoing, stream.rank, write)
        reader.num_sent_tokens = tokens.stop
        reader.next_chunk += 1

    def post_handoff(self, outgoing: Outgoing, reader: Reader) -> None:
        """Write the handoff row, which has been packed."""
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
        landed = AuxLanded(outgoing.transfer.room, None if destination.is_base else HANDOFF_RANK)
        write = Write(peer=destination.handoff_agent, descriptors=descriptors, notification=encode_notification(landed))
        self._post(outgoing, HANDOFF_RANK, write)

    def end(self, write_id: int) -> Outgoing:
        """A write has ended: the room that it was for."""
        posted = self._posted.pop(write_id)
        self._queued_s[posted.rank] -= posted.cost_s
        posted.outgoing.write_ids.remove(write_id)
        return posted.outgoing

    def overdue(self) -> list[Posted]:
        """Writes that should have ended long ago; each is returned once, and may yet end."""
        late = [posted for posted in self._posted.values() if self.now >= posted.deadline]
        for posted in late:
            posted.deadline = float("inf")
        return late

    def _post(self, outgoing: Outgoing, rank: int, write: Write) -> None:
        write_id = next(self._ids)
        outgoing.stages.reach(Stage.FIRST_WRITE, self.now)
        outgoing.write_ids.add(write_id)
        if outgoing.transfer.expects(Event.STARTED):
            outgoing.transfer.on(Event.STARTED)
        cost_s = write.descriptors.total_nbytes / FLOOR_BYTES_PER_S + len(write.descriptors) * FLOOR_DESCRIPTOR_S
        self._queued_s[rank] = max(0.0, self._queued_s.get(rank, 0.0)) + cost_s
        limit_s = self._limits.write_timeout + self._queued_s[rank]
        self._posted[write_id] = Posted(outgoing, rank, write, cost_s, limit_s, self.now + limit_s)
        self._site.agents[rank].write(write_id, write)


def _landed(
    outgoing: Outgoing, reader: Reader, stream: Stream, index: int, num_streams: int, is_last: bool
) -> ChunkLanded:
    """Ours count the chunks of each writer. A base peer hears of one writer, whose chunks are those of all our stages
    in turn.
    """
    room = outgoing.transfer.room
    if not reader.registered.destination.is_base:
        return ChunkLanded(room, reader.next_chunk, is_last, stream.rank)
    chunk = reader.next_chunk * num_streams + index
    return ChunkLanded(room, chunk, is_last and index == num_streams - 1)
