"""Both directions of one engine: what a peer's silence means for the rooms that it was asked to fill."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hinges import Notes, site

from diptych.core.request import Request, SamplingParams, TakeFrom
from diptych.core.sequence import Sequence
from diptych.transfer.control import Heartbeat, encode_control
from diptych.transfer.hinge import Hinge
from diptych.transfer.ports import HingeLimits

LIMITS = HingeLimits(max_rooms=2)
LOST_S = LIMITS.heartbeat_timeout + 0.1


def asking_hinge(notes: Notes) -> tuple[Hinge, Sequence]:
    """It has asked a prefill engine that it has never met."""
    hinge = Hinge(site("decode", notes), notes, limits=LIMITS, rng=random.Random(1))
    handoff = TakeFrom("127.0.0.1:7", "prefill", None)
    request = Request(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(), handoff=handoff)
    asking = Sequence(request, [1, 2, 3], 8)
    hinge.tick(0.0, 0.0)
    hinge.receiver.begin(asking, SimpleNamespace(pages=[3], num_leased=0))
    return hinge, asking


@pytest.mark.parametrize("is_unreachable", [True, False])
def test_pages_of_a_silent_peer_come_back_only_if_it_cannot_have_heard(is_unreachable: bool) -> None:
    notes = Notes(is_unreachable=is_unreachable)
    hinge, asking = asking_hinge(notes)
    hinge.tick(LOST_S, LOST_S)
    (gave_up,) = hinge.receiver.news()
    assert gave_up.sequence is asking and gave_up.error is None
    hinge.receiver.keep(asking, [3])
    assert hinge.receiver.freed_pages() == ([3] if is_unreachable else [])
    assert hinge.is_idle is is_unreachable


def test_who_has_answered_once_has_heard() -> None:
    notes = Notes(is_unreachable=True)
    hinge, asking = asking_hinge(notes)
    notes.inbox.append((0, encode_control(Heartbeat(sequence=1, seen=1), "prefill")))
    hinge.tick(0.5, 0.5)
    hinge.tick(0.5 + LOST_S, 0.5 + LOST_S)
    hinge.receiver.keep(asking, [3])
    assert hinge.receiver.freed_pages() == [] and ("withdraw", "127.0.0.1:7") not in notes.commands
