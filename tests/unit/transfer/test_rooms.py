"""Rooms: bounds, tombstones, and what a request's bootstrap fields mean."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import InvariantError, Overloaded, RequestError
from diptych.transfer.rooms import Rendezvous, RoomTable, RoomTaken, expand_rendezvous, expand_rooms


def table(max_rooms: int = 2, max_tombstones: int = 2) -> RoomTable[str]:
    return RoomTable(max_rooms, max_tombstones=max_tombstones)


def test_a_room_is_used_once() -> None:
    rooms = table()
    assert rooms.open(5, "five") == "five"
    with pytest.raises(RoomTaken, match="bootstrap_room 5 is open already") as refused:
        rooms.open(5, "again")
    assert (refused.value.status, refused.value.param) == (409, "bootstrap_room")
    assert rooms.find(5) == "five"
    assert rooms.close(5) == "five"
    with pytest.raises(RoomTaken, match="bootstrap_room 5 is over"):
        rooms.open(5, "again")
    assert rooms.num_duplicates == 2
    assert rooms.is_dead(5) and not rooms.is_dead(6)


def test_late_news_and_strangers_are_told_apart() -> None:
    rooms = table()
    rooms.open(5, "five")
    rooms.close(5)
    assert rooms.find(5) is None and rooms.find(6) is None and rooms.find(6) is None
    assert (rooms.num_late, rooms.num_unknown) == (1, 2)


def test_rooms_are_bounded() -> None:
    rooms = table()
    rooms.open(1, "a")
    rooms.open(2, "b")
    with pytest.raises(Overloaded, match="all 2 rooms are in use"):
        rooms.open(3, "c")
    assert (len(rooms), rooms.num_free, list(rooms)) == (2, 0, [(1, "a"), (2, "b")])
    rooms.close(1)
    rooms.open(3, "c")
    with pytest.raises(InvariantError, match="room 1 was closed but is not open"):
        rooms.close(1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 8), max_size=60), st.integers(0, 4))
def test_tombstones_are_bounded_and_the_oldest_goes_first(order: list[int], max_tombstones: int) -> None:
    rooms = table(1, max_tombstones)
    dead: list[int] = []
    for room in order:
        assert [number for number in range(9) if rooms.is_dead(number)] == sorted(dead)
        if room in dead:
            with pytest.raises(RoomTaken):
                rooms.open(room, "x")
        else:
            rooms.open(room, "x")
            rooms.close(room)
            dead = [*dead, room][-max_tombstones:] if max_tombstones else []


def test_a_scalar_room_means_one_after_the_other() -> None:
    assert expand_rooms(10, 3) == [10, 11, 12]
    assert expand_rooms(2**63 - 2, 4) == [2**63 - 2, 2**63 - 1, 0, 1]
    assert expand_rooms([4, 2], 2) == [4, 2]


@pytest.mark.parametrize(
    "room,count,message",
    [
        ([1, 2], 3, "has 2 entries for 3 sequences"),
        ([1, 1], 2, "names a room twice"),
        (-1, 1, "got -1"),
        (2**63, 1, "got 9223372036854775808"),
        (True, 1, "got True"),
        ([1, None], 2, "got None"),
        ([1, "2"], 2, "got '2'"),
        (["x", {}], 2, "got 'x'"),
    ],
)
def test_rooms_that_cannot_be(room, count: int, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        expand_rooms(room, count)
    assert refused.value.param == "bootstrap_room"


def test_rendezvous_of_a_batch() -> None:
    assert expand_rendezvous("h", None, room=7, num_sequences=2) == [Rendezvous("h", 8998, 7), Rendezvous("h", 8998, 8)]
    assert expand_rendezvous(["a", "b"], [1, None], room=[5, 6], num_sequences=2, default_port=99) == [
        Rendezvous("a", 1, 5),
        Rendezvous("b", 99, 6),
    ]


def test_decode_drives_has_no_room_and_unified_no_host() -> None:
    assert expand_rendezvous("h", 80, room=None, num_sequences=2) == [Rendezvous("h", 80, None)] * 2
    assert expand_rendezvous(None, None, room=None, num_sequences=2) == [None, None]


@pytest.mark.parametrize(
    "host,port,room,param",
    [
        (None, None, 3, "bootstrap_host"),
        (["a"], None, 3, "bootstrap_host"),
        ("", None, 3, "bootstrap_host"),
        ([1, 2], None, 3, "bootstrap_host"),
        ("a", [1], 3, "bootstrap_port"),
        ("a", 0, 3, "bootstrap_port"),
        ("a", 65536, 3, "bootstrap_port"),
        ("a", [1, "2"], 3, "bootstrap_port"),
        ("a", True, 3, "bootstrap_port"),
        ("a", None, [3], "bootstrap_room"),
    ],
)
def test_rendezvous_that_cannot_be(host, port, room, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        expand_rendezvous(host, port, room=room, num_sequences=2)
    assert refused.value.param == param
