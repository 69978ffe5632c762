"""Our prefill engine and a decode rank of the base format, over real ZMQ and NIXL: every byte that lands is checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from base_peer import BasePeer, Shape
from engines import EngineUnderTest, request
from layered_engine import HEAD_DIM, NUM_HEADS, NUM_LAYERS, elements, logprobs_of
from toy_engine import VOCAB

from diptych.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from diptych.core.batch import FinishReason
from diptych.core.request import HandTo
from diptych.engine.toy import next_token

PAGE_SIZE = 4
NUM_PAGES = 96
LAYERED_ENGINE = Path(__file__).with_name("layered_engine.py")


@pytest.fixture(scope="module")
def prefill() -> Iterator[EngineUnderTest]:
    config = replace(
        EngineConfig(),
        transfer=TransferConfig(role="prefill"),
        scheduler=SchedulerConfig(check_invariants=True, max_num_batched_tokens=16),
        cache=CacheConfig(page_size=PAGE_SIZE),
    )
    engine = EngineUnderTest("prefill", [sys.executable, str(LAYERED_ENGINE)], config, {"TOY_STEP_S": "0.005"})
    yield engine
    engine.close()


@pytest.fixture
def peers(prefill) -> Iterator[list[BasePeer]]:
    """Two decode ranks that have registered; the engine is at rest before and after."""
    peers = [new_peer(prefill), new_peer(prefill)]
    yield peers
    prefill.wait_at_rest()
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(peers) -> BasePeer:
    return peers[0]


def new_peer(engine: EngineUnderTest) -> BasePeer:
    """A peer that has registered."""
    peer = BasePeer(Shape(NUM_LAYERS, NUM_PAGES, PAGE_SIZE, NUM_HEADS, HEAD_DIM, itemsize=4))
    peer.push(engine.address.address, peer.registration())
    return peer


def prompt_of(length: int) -> list[int]:
    return [(7 * length + 3 * i) % VOCAB for i in range(length)]


def pages_for(length: int, first: int = 0) -> list[int]:
    """Scattered pages, so that a wrong order shows."""
    return [(first + 37 * i) % NUM_PAGES for i in range(-(-length // PAGE_SIZE))]


def check_kv(peer: BasePeer, prompt: list[int], pages: list[int]) -> None:
    expected = elements(prompt).transpose(1, 2, 0, 3, 4)  # layer, K or V, token, head, dim
    landed = np.ascontiguousarray(peer.tokens(pages, len(prompt))).view("<i4")
    assert landed.shape == expected.shape and (landed == expected).all()


def send(peer: BasePeer, engine: EngineUnderTest, frames: list[bytes]) -> None:
    peer.push(engine.address.address, frames)


@pytest.mark.parametrize("told_first", ["peer", "engine"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 32, 33, 70])
def test_every_byte_lands(prefill, peer, told_first: str, length: int) -> None:
    engine = prefill
    room, slot = 1000 * length + (told_first == "peer"), length % 8
    prompt, pages = prompt_of(length), pages_for(length)
    sent = request(f"r{room}", prompt, HandTo(room), max_tokens=5, logprobs=2)
    frames = peer.transfer_info(room, pages, slot=slot)
    if told_first == "peer":
        send(peer, engine, frames)
        time.sleep(0.05)
        engine.send(sent)
    else:
        engine.send(sent)
        time.sleep(0.05)
        send(peer, engine, frames)
    peer.wait(room)
    check_kv(peer, prompt, pages)
    check_aux(peer, slot, next_token(prompt, VOCAB), num_top=2)
    assert peer.is_untouched_beyond(pages, [slot])
    engine.wait(sent.request_id)
    assert engine.tokens(sent.request_id) == [next_token(prompt, VOCAB)]
    assert engine.reason(sent.request_id) is FinishReason.LENGTH
    arrivals, num_chunks = peer.arrivals[room], len(peer.arrivals[room].chunks)
    assert arrivals.num_aux == 1 and sorted(arrivals.chunks) == [(i, i == num_chunks - 1) for i in range(num_chunks)]
    assert not peer.strange


def check_aux(peer: BasePeer, slot: int, token: int, *, num_top: int | None) -> None:
    """The row: token, its logprob, the likeliest; all else is zero."""
    logprobs = None if num_top is None else logprobs_of(token, num_top)
    assert peer.ints(0, slot) == [token] + [0] * 15
    assert peer.floats(1, slot) == [logprobs.logprob if logprobs else 0.0] + [0.0] * 15
    assert peer.ints(2, slot) == [token if logprobs else 0] + [0] * 15
    top = logprobs.top if logprobs else []
    assert peer.floats(3, slot) == [value for _, value in top] + [0.0] * (128 - len(top))
    assert peer.ints(4, slot) == [token_id for token_id, _ in top] + [0] * (128 - len(top))


def test_many_rooms_at_once(prefill, peer) -> None:
    rooms = {}
    for index, length in enumerate([9, 30, 1, 44, 16, 5]):
        pages = [15 * index + page for page in reversed(range(-(-length // PAGE_SIZE)))]
        rooms[77_000 + index] = (prompt_of(length), pages, index)
    for room, (prompt, pages, slot) in rooms.items():
        send(peer, prefill, peer.transfer_info(room, pages, slot=slot))
        prefill.send(request(f"m{room}", prompt, HandTo(room), max_tokens=3))
    peer.wait(*rooms)
    for prompt, pages, slot in rooms.values():
        check_kv(peer, prompt, pages)
        check_aux(peer, slot, next_token(prompt, VOCAB), num_top=None)
    assert peer.is_untouched_beyond([p for _, pages, _ in rooms.values() for p in pages], list(range(6)))


def test_a_prefix_hit_on_prefill_is_sent_all_the_same(prefill, peer) -> None:
    for room in (501, 502):
        send(peer, prefill, peer.transfer_info(room, pages_for(30, room), slot=room % 8))
        prefill.send(request(f"h{room}", prompt_of(30), HandTo(room), max_tokens=3))
        peer.wait(room)
        check_kv(peer, prompt_of(30), pages_for(30, room))


def test_whole_pages_travel_while_the_rest_is_computed(prefill, peer) -> None:
    pages = list(range(NUM_PAGES))
    prompt = [5, *prompt_of(NUM_PAGES * PAGE_SIZE - 1)]  # 24 steps of 16 tokens
    send(peer, prefill, peer.transfer_info(601, pages))
    prefill.send(request("long", prompt, HandTo(601), max_tokens=3))
    peer.wait(601)
    check_kv(peer, prompt, pages)
    assert len(peer.arrivals[601].chunks) >= 10
    assert peer.arrivals[601].chunks[-1][1], "the last chunk came before others"


def test_more_pages_may_be_named_than_needed(prefill, peer) -> None:
    pages = pages_for(40)
    send(peer, prefill, peer.transfer_info(602, pages))
    prefill.send(request("more", prompt_of(10), HandTo(602), max_tokens=3))
    peer.wait(602)
    check_kv(peer, prompt_of(10), pages[:3])
    assert peer.is_untouched_beyond(pages[:3], [0])


def test_two_ranks_of_one_room(prefill, peers) -> None:
    prompt = prompt_of(18)
    send(peers[0], prefill, peers[0].transfer_info(700, pages_for(18, 1), slot=1, num_ranks=2))
    prefill.send(request("two", prompt, HandTo(700), max_tokens=3))
    time.sleep(0.3)
    peers[0].poll()
    assert not peers[0].arrivals, "something was written before every rank had named the room"
    send(peers[1], prefill, peers[1].transfer_info(700, pages_for(18, 2), slot=2, num_ranks=2))
    for index, peer in enumerate(peers, 1):
        peer.wait(700)
        check_kv(peer, prompt, pages_for(18, index))
        check_aux(peer, index, next_token(prompt, VOCAB), num_top=None)
        assert peer.is_untouched_beyond(pages_for(18, index), [index])


@pytest.mark.parametrize("dummy_first", [True, False])
def test_a_dummy_gets_nothing(prefill, peers, dummy_first: bool) -> None:
    room = 800 + dummy_first
    real, dummy = peers
    named = [(dummy, []), (real, pages_for(9))] if dummy_first else [(real, pages_for(9)), (dummy, [])]
    for peer, pages in named:
        send(peer, prefill, peer.transfer_info(room, pages, num_ranks=2))
    prefill.send(request(f"dummy{room}", prompt_of(9), HandTo(room), max_tokens=3))
    real.wait(room)
    check_kv(real, prompt_of(9), pages_for(9))
    dummy.poll()
    assert not dummy.arrivals and dummy.is_untouched_beyond([], [])


def test_a_room_of_dummies_ends(prefill, peer) -> None:
    send(peer, prefill, peer.transfer_info(810, []))
    prefill.send(request("dummies", prompt_of(9), HandTo(810), max_tokens=3))
    prefill.wait("dummies")
    assert prefill.reason("dummies") is FinishReason.LENGTH
    peer.poll()
    assert not peer.arrivals and peer.is_untouched_beyond([], [])


def test_too_few_pages_are_refused_before_any_byte(prefill, peer) -> None:
    send(peer, prefill, peer.transfer_info(820, [1, 2]))
    prefill.send(request("few", prompt_of(9), HandTo(820), max_tokens=3))
    prefill.wait("few")
    failure = prefill.failure("few")
    assert failure is not None and failure.kind == "TransferRejected" and "3 pages" in failure.message
    peer.poll()
    assert not peer.arrivals and peer.is_untouched_beyond([], [])


def test_addresses_that_are_not_registered_memory_fail_the_room_alone(prefill, peers) -> None:
    liar, honest = peers
    send(liar, prefill, liar.transfer_info(830, [NUM_PAGES + 10**6]))
    prefill.send(request("lie", prompt_of(3), HandTo(830), max_tokens=3))
    prefill.wait("lie")
    assert prefill.failure("lie") is not None
    send(honest, prefill, honest.transfer_info(831, [3]))
    prefill.send(request("truth", prompt_of(3), HandTo(831), max_tokens=3))
    honest.wait(831)
    check_kv(honest, prompt_of(3), [3])


def test_a_room_is_used_once(prefill, peer) -> None:
    send(peer, prefill, peer.transfer_info(840, [3]))
    prefill.send(request("once", prompt_of(3), HandTo(840), max_tokens=3))
    peer.wait(840)
    prefill.wait("once")
    prefill.send(request("twice", prompt_of(4), HandTo(840), max_tokens=3))
    prefill.wait("twice")
    failure = prefill.failure("twice")
    assert failure is not None and failure.kind == "RoomTaken"


def test_an_abort_ends_the_room(prefill, peer) -> None:
    prefill.send(request("gone", prompt_of(9), HandTo(850), max_tokens=3))
    prefill.abort("gone")
    prefill.wait("gone")
    assert prefill.reason("gone") is FinishReason.ABORT
    send(peer, prefill, peer.transfer_info(850, pages_for(9)))
    prefill.wait_at_rest()
    time.sleep(0.1)
    peer.poll()
    assert not peer.arrivals and peer.is_untouched_beyond([], [])


def test_a_peer_that_vanishes_costs_its_room_alone(prefill, peers) -> None:
    gone, honest = BasePeer(peers[0].shape), peers[1]
    send(gone, prefill, gone.registration())
    send(gone, prefill, gone.transfer_info(860, [1, 2]))
    prefill.wait_until(lambda: prefill.load().transfer.num_outgoing_rooms == 1, "the room")
    gone.close()
    prefill.send(request("there", prompt_of(6), HandTo(860), max_tokens=3))
    prefill.send(request("here", prompt_of(6), HandTo(861), max_tokens=3))
    send(honest, prefill, honest.transfer_info(861, [1, 2]))
    honest.wait(861)
    check_kv(honest, prompt_of(6), [1, 2])
    prefill.wait("there")
    assert prefill.failure("there") is not None
