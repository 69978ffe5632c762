"""The prefill side alone: registrations that repeat, contradict themselves or come from the dead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hinges import LAYOUT, Notes, identity, site

from diptych.core.request import SamplingParams
from diptych.errors import PeerIncompatible, TransferError
from diptych.kv.layout import KVLayout
from diptych.transfer.agent import PeerAdded, PeerRefused
from diptych.transfer.control import Failed, HelloReply, Joined, Quiesced
from diptych.transfer.extension import PrefillRequest, RoomExtension
from diptych.transfer.peers import PeerBook
from diptych.transfer.ports import HingeLimits
from diptych.transfer.sender import Sender
from diptych.transfer.wire import Registration, TransferInfo

LIMITS = HingeLimits(max_rooms=2)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def book(notes) -> PeerBook:
    return PeerBook(notes, identity("prefill"), LIMITS)


@pytest.fixture
def sender(notes, book) -> Sender:
    return Sender(site("prefill", notes), book, limits=LIMITS)


def registration(layout: KVLayout = LAYOUT, metadata: bytes = b"metadata") -> Registration:
    return Registration(
        endpoint="127.0.0.1",
        port=2,
        agent_name="agent",
        agent_metadata=metadata,
        kv_addresses=(4096,),
        aux_addresses=tuple(range(64, 64 * 7, 64)),
        gpu_id=0,
        extension=identity("decode", layout),
    )


def transfer_info(room: int, *, with_prompt: bool = True) -> TransferInfo:
    prompt = PrefillRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams())
    return TransferInfo(
        room=room,
        endpoint="127.0.0.1",
        port=2,
        agent_name="agent",
        dst_pages=np.array([1], dtype=np.int32),
        aux_slot=0,
        num_readers=1,
        extension=RoomExtension(instance_id="decode", generation=5, prompt=prompt if with_prompt else None),
    )


def test_a_repeated_registration_is_answered_and_nothing_else(sender, notes) -> None:
    sender.register(registration(), 0.0)
    sender.join(transfer_info(1), 0.0)
    sender.register(registration(), 1.0)
    sender.join(transfer_info(1), 1.0)
    assert [command[0] for command in notes.commands] == ["add_peer"]
    assert len(notes.told(HelloReply)) == 2 and len(notes.told(Joined)) == 2
    assert len(sender.take_requests()) == 1
    sender.on_event(PeerAdded("agent", "agent"))
    (_, outgoing), *_ = list(sender.rooms)
    assert all(reader.registered.is_ready for reader in outgoing.readers.values())


@pytest.mark.parametrize("page_size", [65521, 2**31 - 1])
def test_absurd_page_sizes_are_refused_at_once(sender, notes, page_size: int) -> None:
    layout = replace(LAYOUT, page_size=page_size)
    sender.register(registration(layout), 0.0)
    (reply,) = notes.told(HelloReply)
    assert f"page_size is 4 at the source and {page_size} at the destination" in reply.refusal
    assert not notes.commands


def test_the_dead_do_not_register(sender, notes, book) -> None:
    book.bury(book.meet("127.0.0.1:2", "decode", 0.0))
    notes.commands.clear()
    sender.register(registration(), 1.0)
    assert not notes.commands and not notes.sent


@pytest.mark.parametrize("error", [PeerIncompatible("damaged"), TransferError("too many new peers")])
def test_a_peer_that_cannot_be_met_fails_its_rooms_and_may_try_again(sender, notes, error: TransferError) -> None:
    sender.register(registration(), 0.0)
    sender.join(transfer_info(1), 0.0)
    sender.on_event(PeerRefused("agent", error))
    (failed,) = notes.told(Failed)
    assert (failed.room, failed.generation, failed.has_posted, failed.message) == (1, 5, False, str(error))
    assert notes.told(Quiesced) and not len(sender.rooms)
    assert all(reply.refusal == "" for reply in notes.told(HelloReply))
    sender.register(registration(), 2.0)
    sender.on_event(PeerAdded("agent", "agent"))
    sender.join(transfer_info(2), 2.0)
    assert len(sender.rooms) == 1


def test_rooms_are_bounded(sender, notes) -> None:
    sender.register(registration(), 0.0)
    for room in (1, 2, 3):
        sender.join(transfer_info(room), 0.0)
    (failed,) = notes.told(Failed)
    assert (failed.room, failed.kind, failed.has_posted) == (3, "Overloaded", False)
    assert len(sender.rooms) == 2


def test_a_room_that_is_over_stays_over(sender, notes) -> None:
    sender.register(registration(), 0.0)
    sender.join(transfer_info(1, with_prompt=False), 0.0)
    sender.expire(LIMITS.room_timeout + 1)
    (failed,) = notes.told(Failed)
    assert failed.kind == "TransferExpired" and "no prompt came" in failed.message
    notes.sent.clear()
    sender.join(transfer_info(1), 40.0)
    assert [type(message) for _, message in notes.sent] == [Quiesced] and not sender.take_requests()


def test_strangers_open_no_room(sender, notes) -> None:
    sender.join(transfer_info(1), 0.0)
    assert not len(sender.rooms) and not notes.sent and not sender.take_requests()


def test_a_flood_of_refused_registrations_fills_no_log(sender, notes, caplog) -> None:
    for _ in range(100):
        sender.register(registration(replace(LAYOUT, page_size=65521)), 0.0)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert len(notes.told(HelloReply)) == 100
