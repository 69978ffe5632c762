"""Engines of several ranks: who writes what to whom, from which rank, and when that may begin; and writes that get
stuck.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hinges import Notes, agent_of, identity, site

from diptych.core.batch import RowOutput
from diptych.core.request import HandTo, Request, SamplingParams
from diptych.core.sequence import Sequence
from diptych.errors import TransferError
from diptych.kv.layout import KVLayout
from diptych.scheduler.ports import Sent
from diptych.transfer.agent import PeerAdded, WriteDone
from diptych.transfer.control import Failed, Quiesced
from diptych.transfer.destination import destination_of
from diptych.transfer.extension import PeerExtension, RoomExtension
from diptych.transfer.handoff import HandoffLayout
from diptych.transfer.peers import PeerBook, PeerState
from diptych.transfer.ports import HingeLimits
from diptych.transfer.posting import FLOOR_DESCRIPTOR_S
from diptych.transfer.sender import Sender
from diptych.transfer.wire import Registration, TransferInfo

LIMITS = HingeLimits(max_rooms=4, write_timeout=5.0)
FULL = KVLayout.single_rank(2, 2, head_dim=1, page_size=4, dtype="float32")


class Prefill:
    """A sender, and what it has been told."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.notes = Notes()
        self.site = site("prefill", self.notes, layout=FULL, shape=shape)
        self.book = PeerBook(self.notes, self.site.identity, LIMITS)
        self.sender = Sender(self.site, self.book, limits=LIMITS)

    def meet(self) -> None:
        """All agents that it wants to meet are met."""
        for command in self.writes("add_peer"):
            self.sender.on_event(PeerAdded(command[1], command[1]), command[-1])

    def writes(self, kind: str = "write") -> list[tuple[object, ...]]:
        return [command for command in self.notes.commands if command[0] == kind]

    def compute(self, room: int, num_tokens: int = 6) -> Sequence:
        """The whole prompt, and its first token."""
        request = Request(
            request_id=f"r{room}",
            prompt_token_ids=list(range(num_tokens)),
            sampling=SamplingParams(),
            handoff=HandTo(room),
        )
        self.sender.expect(request, 0.0)
        sequence = Sequence(request, list(range(num_tokens)), 8)
        sequence.num_confirmed_tokens = num_tokens
        self.sender.computed(sequence, SimpleNamespace(pages=[3, 4]))
        self.sender.sampled(sequence, RowOutput([7]))
        return sequence


def registration(
    extension: PeerExtension | None, name: str = "decode", *, kv_addresses: tuple[int, ...] = (4096,)
) -> Registration:
    return Registration(
        endpoint="127.0.0.1",
        port=2,
        agent_name=agent_of(name, 0),
        agent_metadata=b"metadata",
        kv_addresses=kv_addresses,
        aux_addresses=tuple(range(64, 64 * 7, 64)),
        gpu_id=0,
        extension=extension,
    )


def decode_of(shape: tuple[int, int]) -> PeerExtension:
    """What a decode engine registers with."""
    notes = Notes()
    extension = site("decode", notes, layout=FULL, shape=shape).registration().extension
    assert isinstance(extension, PeerExtension)
    return extension


def asked(
    room: int, *, knows_you: bool = True, is_base: bool = False, name: str = "decode", pages: tuple[int, ...] = (8, 9)
) -> TransferInfo:
    return TransferInfo(
        room=room,
        endpoint="127.0.0.1",
        port=2,
        agent_name=agent_of(name, 0),
        dst_pages=np.array(pages, dtype=np.int32),
        aux_slot=0,
        num_readers=1,
        extension=None if is_base else RoomExtension(instance_id="decode", generation=5, knows_you=knows_you),
    )


def test_every_rank_writes_its_part_and_one_the_handoff_row() -> None:
    prefill = Prefill((2, 2))
    prefill.sender.register(registration(decode_of((1, 1))), 0.0)
    assert {command[-1] for command in prefill.writes("add_peer")} == {0, 1, 2, 3}
    prefill.meet()
    prefill.sender.join(asked(11), 0.0)
    prefill.compute(11)
    named = sorted((command[-1], command[3]) for command in prefill.writes())
    assert named == [(0, b"11_aux_0"), *((rank, b"11_kv_0_1_%d" % rank) for rank in range(4))]
    ids = [command[1] for command in prefill.writes()]
    for write_id in ids[:-1]:
        prefill.sender.on_event(WriteDone(write_id, "agent-decode", 8, 1, 0.0, "shm"))
        assert not prefill.notes.told(Quiesced)
    prefill.sender.on_event(WriteDone(ids[-1], "agent-decode", 8, 1, 0.0, "shm"))
    assert prefill.notes.told(Quiesced) and prefill.sender.num_done == 1


def test_each_decode_rank_is_written_to_by_its_own_agent() -> None:
    prefill = Prefill((1, 1))
    prefill.sender.register(registration(decode_of((2, 1))), 0.0)
    prefill.meet()
    prefill.sender.join(asked(11), 0.0)
    prefill.compute(11)
    peers = sorted((command[2], command[3]) for command in prefill.writes())
    assert peers == [
        ("agent-decode", b"11_aux_0"),
        ("agent-decode", b"11_kv_0_1_0"),
        ("agent-decode-1", b"11_kv_0_1_0"),
    ]


def test_ranks_with_processes_of_their_own_write_only_where_their_death_would_be_noticed() -> None:
    prefill = Prefill((2, 1))
    prefill.sender.register(registration(decode_of((1, 1))), 0.0)
    prefill.meet()
    prefill.sender.join(asked(11, knows_you=False), 0.0)
    prefill.compute(11)
    assert not prefill.writes()
    prefill.sender.join(asked(11), 0.0)
    assert len(prefill.writes()) == 3


def test_a_base_peer_hears_of_one_writer_whatever_the_stages() -> None:
    prefill = Prefill((1, 2))
    prefill.sender.register(registration(None, kv_addresses=(1, 2, 3, 4)), 0.0, rank=0)
    prefill.meet()
    prefill.sender.join(asked(11, is_base=True), 0.0, rank=0)
    prefill.compute(11)
    named = [(command[-1], command[3]) for command in prefill.writes()]
    assert named == [(0, b"11_kv_0_0"), (1, b"11_kv_1_1"), (0, b"11_aux")]


def test_a_room_of_base_peers_waits_until_every_rank_has_been_told() -> None:
    prefill = Prefill((2, 1))
    for rank, name in enumerate(("one", "two")):
        prefill.sender.register(registration(None, name, kv_addresses=(1, 2, 3, 4)), 0.0, rank=rank)
    prefill.meet()
    prefill.sender.join(asked(11, is_base=True, name="one"), 0.0, rank=0)
    prefill.compute(11)
    assert not prefill.writes()
    prefill.sender.join(asked(11, is_base=True, name="two"), 0.0, rank=1)
    named = [(command[-1], command[2], command[3]) for command in prefill.writes()]
    assert named == [
        (0, "agent-one", b"11_kv_0_1"),
        (0, "agent-one", b"11_aux"),
        (1, "agent-two", b"11_kv_0_1"),
        (0, "agent-two", b"11_aux"),
    ]


def test_a_dummy_of_a_base_peer_gets_nothing() -> None:
    prefill = Prefill((2, 1))
    for rank in (0, 1):
        prefill.sender.register(registration(None, kv_addresses=(1, 2, 3, 4)), 0.0, rank=rank)
    prefill.meet()
    prefill.sender.join(asked(11, is_base=True), 0.0, rank=0)
    prefill.sender.join(asked(11, is_base=True, pages=()), 0.0, rank=1)
    prefill.compute(11)
    assert [command[3] for command in prefill.writes()] == [b"11_kv_0_1", b"11_aux"]


def test_a_stuck_write_fails_its_room_and_frees_our_pages_but_not_the_peers() -> None:
    prefill = Prefill((1, 1))
    prefill.sender.register(registration(decode_of((1, 1))), 0.0)
    prefill.meet()
    prefill.sender.join(asked(11), 0.0)
    sequence = prefill.compute(11)
    (stuck, *_), aux = prefill.writes()[0][1:], prefill.writes()[1][1]
    prefill.sender.on_event(WriteDone(aux, "agent-decode", 8, 1, 0.0, "shm"))
    prefill.sender.now = LIMITS.write_timeout
    prefill.sender.expire(prefill.sender.now)
    assert not prefill.notes.told(Failed)
    prefill.sender.now = LIMITS.write_timeout + 100 * FLOOR_DESCRIPTOR_S
    prefill.sender.expire(prefill.sender.now)
    (failed,) = prefill.notes.told(Failed)
    assert failed.has_posted and "has not ended within" in failed.message and "agent-decode" in failed.message
    (sent,) = prefill.sender.news()
    assert isinstance(sent, Sent) and sent.sequence is sequence and isinstance(sent.error, TransferError)
    assert not prefill.sender.is_reading(sequence) and not prefill.notes.told(Quiesced)
    prefill.sender.expire(prefill.sender.now + 100.0)
    assert len(prefill.notes.told(Failed)) == 1
    prefill.sender.on_event(WriteDone(stuck, "agent-decode", 8, 1, 0.0, "shm"))
    assert prefill.notes.told(Quiesced) and not len(prefill.sender.rooms) and not prefill.sender.news()


def test_a_peer_is_dead_when_its_engine_and_all_of_its_ranks_are() -> None:
    notes = Notes()
    book = PeerBook(notes, identity("us"), LIMITS)
    peer = book.meet("127.0.0.1:9", "them", 0.0)
    peer.identity = identity("them", FULL, shape=(2, 1))
    late = LIMITS.heartbeat_timeout + 1.0
    assert book.newly_lost(late) == [peer]
    notes.refused = {"127.0.0.1:9", "127.0.0.1:100"}
    assert book.newly_gone(late) == [] and peer.has_ended and peer.state is PeerState.LOST
    notes.refused.add("127.0.0.1:101")
    assert book.newly_gone(late + 1.0) == [peer]


def test_a_destination_names_every_agent_once() -> None:
    extension = decode_of((2, 1))
    found = destination_of(
        registration(extension),
        identity("prefill", FULL, shape=(2, 2)),
        handoff=HandoffLayout(num_slots=1, num_top_logprobs=4, hidden_nbytes=0),
    )
    assert set(found.agents) == {"agent-decode", "agent-decode-1"}
    assert found.pairs == {(rank, agent_of("decode", rank % 2)) for rank in range(4)} | {(0, "agent-decode")}
