"""Who is alive: what proves a death and what does not, and that strangers cannot fill the book."""

from __future__ import annotations

import pytest

from diptych.transfer import peers
from diptych.transfer.control import Heartbeat, Hello, decode_control
from diptych.transfer.extension import LayoutFields, PeerExtension
from diptych.transfer.peers import PeerBook, PeerState
from diptych.transfer.ports import HingeLimits

LIMITS = HingeLimits(heartbeat_interval=0.5, heartbeat_timeout=2.0)


class FakeNetwork:
    """Notes what is sent; `dead` addresses refuse."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.dead: set[str] = set()
        self.forgotten: list[str] = []

    def send(self, address: str, frames: list[bytes]) -> None:
        control = decode_control(frames)
        self.sent.append((address, control.message))

    def receive(self) -> list[list[bytes]]:
        return []

    def is_refused(self, address: str) -> bool:
        return address in self.dead

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def book(network) -> PeerBook:
    fields = LayoutFields(
        first_layer=0,
        num_layers=1,
        first_kv_head=0,
        num_kv_heads=1,
        head_dim=1,
        page_size=4,
        dtype="float32",
        num_pages=8,
        stride=32,
    )
    identity = PeerExtension(
        instance_id="we",
        layout=fields,
        model_layers=1,
        model_kv_heads=1,
        model_fingerprint="m",
        control_endpoint="me:1",
    )
    return PeerBook(network, identity, LIMITS)


def test_silence_alone_buries_nobody(book, network) -> None:
    peer = book.meet("a:1", "one", 0.0)
    assert book.newly_lost(1.9) == [] and book.newly_lost(2.1) == [peer] and book.newly_lost(3.0) == []
    assert peer.state is PeerState.LOST and not peer.is_usable
    for now in (2.1, 100.0, 10_000.0):
        assert book.newly_gone(now) == []
    assert isinstance(network.sent[-1][1], Hello)
    assert book.heard(peer, 10_001.0) and peer.is_usable
    assert not book.heard(peer, 10_002.0)


def test_a_refused_port_is_proof(book, network) -> None:
    peer = book.meet("a:1", "one", 0.0)
    book.newly_lost(2.1)
    network.dead.add("a:1")
    assert book.newly_gone(2.2) == [peer] and book.newly_gone(2.3) == []
    assert peer.state is PeerState.GONE and list(book) == [] and network.forgotten == ["a:1"]
    assert book.meet("a:1", "one", 3.0).state is PeerState.GONE


def test_probes_are_paced(book, network) -> None:
    book.meet("a:1", "one", 0.0)
    book.newly_lost(2.1)
    for step in range(100):
        book.newly_gone(2.1 + step / 100)
    assert sum(isinstance(message, Hello) for _, message in network.sent) == 2


def test_another_instance_that_answers_is_proof_for_the_one_asked_after_alone(book, network) -> None:
    first, second, elsewhere = (
        book.meet("a:1", "one", 0.0),
        book.meet("a:1", "two", 0.0),
        book.meet("b:1", "three", 0.0),
    )
    book.newly_lost(2.1)
    book.heard(second, 2.2)
    assert book.newly_gone(2.2) == []
    book.answered(first.nonce, "two")
    assert book.newly_gone(2.3) == [first]
    assert network.forgotten == [], "the second still needs the connection"
    book.answered(0, "x")
    book.answered(99, "x")
    book.answered(elsewhere.nonce, "three")
    assert book.newly_gone(2.3) == []


def test_heartbeats_are_sent_to_everyone_at_a_steady_pace(book, network) -> None:
    book.meet("a:1", "one", 0.0)
    book.meet("b:1", "two", 0.0)
    for step in range(100):
        book.beat(step / 50)
    beats = [
        message.sequence for address, message in network.sent if address == "a:1" and isinstance(message, Heartbeat)
    ]
    assert beats == [1, 2, 3, 4]


def test_strangers_cannot_fill_the_book(book) -> None:
    known = book.meet("a:1", "one", 0.0)
    for number in range(2 * peers.MAX_PEERS):
        book.meet(f"x:{number + 1}", f"stranger{number}", 0.0)
    assert len(list(book)) == peers.MAX_PEERS
    assert book.meet("y:1", "late", 0.0).state is PeerState.GONE and book.find("late") is None
    assert book.meet("a:1", "one", 0.0) is known


def test_who_is_long_silent_may_be_forgotten_and_met_again(book, network) -> None:
    peer = book.meet("a:1", "one", 0.0)
    book.newly_lost(2.1)
    assert book.long_silent(peers.FORGET_S) == [] and book.long_silent(peers.FORGET_S + 1) == [peer]
    book.forget(peer)
    assert peer.state is PeerState.GONE and list(book) == [] and network.forgotten == ["a:1"]
    again = book.meet("a:1", "one", 100.0)
    assert again is not peer and again.is_usable, "it was not proved dead"
    assert book.newly_gone(100.0) == []


def test_dead_instances_are_remembered_within_bounds(book, monkeypatch) -> None:
    monkeypatch.setattr(peers, "MAX_DEAD_INSTANCES", 3)
    for number in range(5):
        book.bury(book.meet(f"a:{number + 1}", f"i{number}", 0.0))
    assert len(book.newly_gone(0.0)) == 5
    assert [book.meet("a:9", f"i{number}", 1.0).state is PeerState.GONE for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_a_peer_that_speaks_but_does_not_hear_us_is_lost_until_it_does(book) -> None:
    peer = book.meet("there:1", "other", 0.0)
    lost_at, now = None, 0.0
    while lost_at is None and now < 10.0:
        book.beat(now)
        book.confirmed(peer, Heartbeat(sequence=1 + int(now / 0.5), seen=min(peer.num_sent, 3)))
        book.heard(peer, now)
        lost_at = now if book.newly_lost(now) else None
        now += 0.1
    assert lost_at is not None and 3.0 <= lost_at < 3.7, "three were seen, the third at 1.0"
    assert not book.heard(peer, now) and peer.state is PeerState.LOST
    book.confirmed(peer, Heartbeat(sequence=50, seen=2**63 - 1))
    assert book.heard(peer, now) and peer.state is PeerState.HEALTHY and peer.num_confirmed == peer.num_sent


def test_who_answers_late_is_not_deaf(book) -> None:
    peer = book.meet("there:1", "other", 0.0)
    for tenth in range(30):
        book.beat(tenth / 10)
    book.heard(peer, 3.0)
    assert book.newly_lost(3.0) == [] and peer.state is PeerState.HEALTHY
