"""The decode side alone: that nothing of a request is kept, and whom it asks again."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
from hinges import Notes, identity, site

from diptych.core.request import Request, SamplingParams, TakeFrom
from diptych.core.sequence import Sequence
from diptych.kv.layout import KVLayout
from diptych.scheduler.ports import Begin, GaveUp
from diptych.transfer.control import Cancel, Failed, HelloReply
from diptych.transfer.peers import PeerBook
from diptych.transfer.ports import HingeLimits
from diptych.transfer.receiver import FIRST_ANSWER_S, FIRST_NUDGE_S, Receiver
from diptych.transfer.wire import AuxLanded, ChunkLanded, Registration, TransferInfo, encode_notification

LIMITS = HingeLimits(max_rooms=2)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def book(notes) -> PeerBook:
    return PeerBook(notes, identity("decode"), LIMITS)


@pytest.fixture
def receiver(notes, book) -> Receiver:
    return Receiver(site("decode", notes), book, network=notes, limits=LIMITS, rng=random.Random(1))


def sequence(room: int | None = None) -> Sequence:
    handoff = TakeFrom("127.0.0.1:7", "prefill", room)
    request = Request(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(), handoff=handoff)
    return Sequence(request, [1, 2, 3], 8)


def begin(receiver: Receiver, asking: Sequence) -> Begin:
    return receiver.begin(asking, SimpleNamespace(pages=[3], num_leased=0))


def land(receiver: Receiver, room: int) -> None:
    receiver.on_hello_reply(HelloReply(identity("prefill")), 0.0)
    receiver.on_notified(encode_notification(ChunkLanded(room, 0, True, 0)))
    receiver.on_notified(encode_notification(AuxLanded(room, 0)))


@pytest.mark.parametrize("end", ["landed", "failed", "refused", "cancelled", "lost"])
def test_nothing_is_kept_of_a_request(receiver, book, notes, end: str) -> None:
    asking = sequence(room=11)
    assert begin(receiver, asking) is Begin.ELSEWHERE
    generation = notes.told(TransferInfo)[0].extension.generation
    if end == "landed":
        land(receiver, 11)
    elif end == "failed":
        receiver.on_failed(Failed(room=11, generation=generation, kind="Overloaded", message="full"))
    elif end == "refused":
        receiver.on_hello_reply(HelloReply(identity("prefill"), "other model"), 0.0)
    elif end == "cancelled":
        receiver.cancel(asking)
        receiver.keep(asking, [3])
        receiver.on_quiesced(11, generation)
    else:
        receiver.lose(book.find("prefill"), is_dead=False)
        receiver.keep(asking, [3])
        receiver.on_quiesced(11, generation)
    assert begin(receiver, asking) is Begin.HERE
    receiver.news()
    gone = weakref.ref(asking)
    del asking
    gc.collect()
    assert gone() is None


def test_who_does_not_answer_is_asked_again(receiver, notes) -> None:
    begin(receiver, sequence(room=11))
    receiver.now = FIRST_NUDGE_S + 0.1
    receiver.expire()
    assert [type(message) for _, message in notes.sent] == [Registration, TransferInfo] * 2
    receiver.on_hello_reply(HelloReply(identity("prefill")), 0.0)
    assert notes.sent.pop()[1].extension.knows_you
    receiver.on_joined(11, notes.told(TransferInfo)[0].extension.generation)
    receiver.now += FIRST_NUDGE_S + 0.1
    receiver.expire()
    assert len(notes.sent) == 4


def test_news_of_another_generation_is_none(receiver, notes) -> None:
    begin(receiver, sequence(room=11))
    other = notes.told(TransferInfo)[0].extension.generation + 1
    receiver.on_failed(Failed(room=11, generation=other, kind="Overloaded", message="full"))
    receiver.on_quiesced(11, other)
    assert not receiver.news() and len(receiver.rooms) == 1


def test_what_peers_say_of_strange_rooms_is_ignored(receiver) -> None:
    for name in (b"1_kv_0_1_0", b"1_aux", b"", b"\xff", b"1_kv_0_2", b"9" * 500, b"-1_aux"):
        receiver.on_notified(name)
    receiver.on_quiesced(1, 1)
    receiver.on_joined(1, 1)
    assert not receiver.news() and receiver.num_foreign_notifications == 5


def test_pages_of_a_silent_peer_stay_until_it_speaks_or_is_dead(receiver, book, notes) -> None:
    asking = sequence(room=11)
    begin(receiver, asking)
    peer = book.find("prefill")
    receiver.lose(peer, is_dead=False)
    (gave_up,) = receiver.news()
    assert gave_up == GaveUp(asking, None, keeps_pages=True)
    receiver.keep(asking, [3])
    assert receiver.freed_pages() == [] and notes.told(Cancel)
    land_late = notes.told(TransferInfo)[0].extension.generation
    receiver.on_quiesced(11, land_late)
    assert receiver.freed_pages() == [3] and not len(receiver.rooms)


def test_a_cancelled_sequence_is_handed_back_at_once_and_its_pages_stay(receiver, book) -> None:
    asking = sequence(room=11)
    begin(receiver, asking)
    receiver.cancel(asking)
    assert receiver.news() == [GaveUp(asking, None, keeps_pages=True)]
    receiver.keep(asking, [3])
    receiver.lose(book.find("prefill"), is_dead=False)
    assert receiver.freed_pages() == [] and not receiver.news()
    receiver.lose(book.find("prefill"), is_dead=True)
    assert receiver.freed_pages() == [3] and not len(receiver.rooms)


def test_who_has_not_answered_fills_one_room(receiver, book) -> None:
    assert begin(receiver, sequence(room=11)) is Begin.ELSEWHERE
    other = sequence(room=12)
    assert begin(receiver, other) is Begin.LATER
    book.heard(book.find("prefill"), 0.1)
    assert begin(receiver, other) is Begin.ELSEWHERE


@pytest.mark.parametrize("local", [True, False])
def test_nobody_waits_long_for_a_first_answer(notes, book, local: bool) -> None:
    limits = HingeLimits(max_rooms=9, allow_local_prefill=local)
    receiver = Receiver(site("decode", notes), book, network=notes, limits=limits, rng=random.Random(1))
    begin(receiver, sequence(room=11))
    receiver.now = FIRST_ANSWER_S
    assert begin(receiver, sequence(room=12)) is (Begin.HERE if local else Begin.LATER)
    assert len(receiver.rooms) == 1


def test_a_cancel_is_repeated_each_second(receiver, notes) -> None:
    asking = sequence(room=11)
    begin(receiver, asking)
    receiver.on_joined(11, notes.told(TransferInfo)[0].extension.generation)
    receiver.cancel(asking)
    for second in range(1, 6):
        receiver.now = second + 0.1 * second
        receiver.expire()
    assert len(notes.told(Cancel)) == 6


def test_who_ends_before_its_room_was_opened_tells_the_peer_that_waits_there(receiver, notes) -> None:
    receiver.cancel(sequence(room=11))
    registration, info, cancel = (message for _, message in notes.sent)
    assert isinstance(registration, Registration) and isinstance(info, TransferInfo) and info.is_dummy
    assert cancel == Cancel(11, info.extension.generation) and not len(receiver.rooms)
    notes.sent.clear()
    receiver.cancel(sequence(room=None))  # decode drives: nobody was told
    assert not notes.sent


def test_a_peer_that_has_joined_but_not_said_who_it_is_is_asked_at_once(receiver, notes) -> None:
    begin(receiver, sequence(room=11))
    notes.sent.clear()
    receiver.on_joined(11, next(iter(receiver.rooms))[1].generation)
    assert [type(message) for _, message in notes.sent] == [Registration]
    receiver.on_notified(encode_notification(ChunkLanded(11, 0, True, 0)))
    receiver.on_notified(encode_notification(AuxLanded(11, 0)))
    assert receiver.num_done == 0
    receiver.on_hello_reply(HelloReply(identity("prefill")), 0.0)
    assert receiver.num_done == 1


def test_a_room_has_landed_when_every_rank_has_written_to_every_rank(notes, book) -> None:
    full = KVLayout.single_rank(2, 2, head_dim=1, page_size=4, dtype="float32")
    ours = site("decode", notes, layout=full, shape=(1, 2))
    receiver = Receiver(ours, book, network=notes, limits=LIMITS, rng=random.Random(1))
    begin(receiver, sequence(room=11))
    receiver.on_hello_reply(HelloReply(identity("prefill", full, shape=(2, 1))), 0.0)
    receiver.on_notified(encode_notification(AuxLanded(11, 0)), 0)
    for writer, reader in [(0, 0), (1, 1), (0, 1), (1, 0)]:
        assert receiver.num_done == 0
        receiver.on_notified(encode_notification(ChunkLanded(11, 0, True, writer)), reader)
    assert receiver.num_done == 1
