"""When a room is complete, whatever the order of its notifications."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.transfer.extension import ForeignFrame
from diptych.transfer.landing import Landing
from diptych.transfer.wire import AuxLanded, ChunkLanded, Notification


def notifications_of(writer: int | None, num_chunks: int) -> list[Notification]:
    chunks = [ChunkLanded(5, chunk, chunk == num_chunks - 1, writer) for chunk in range(num_chunks)]
    return [*chunks, AuxLanded(5, writer)]


@settings(deadline=None)
@given(st.data())
def test_any_order_and_duplicates(data: st.DataObject) -> None:
    sizes = data.draw(st.dictionaries(st.integers(0, 7), st.integers(1, 5), min_size=1, max_size=3))
    needed = [item for writer, size in sizes.items() for item in notifications_of(writer, size)]
    order = data.draw(st.permutations(needed + data.draw(st.lists(st.sampled_from(needed), max_size=4))))
    landing = Landing(sizes, max_chunks=10)
    seen: set[Notification] = set()
    for notification in order:
        assert not landing.is_complete or notification in seen
        assert landing.add(notification) == (notification not in seen)
        seen.add(notification)
        assert landing.is_complete == (seen == set(needed)) == (not landing.missing_writers)
    assert landing.is_complete
    assert landing.num_duplicates == len(order) - len(needed)


def test_a_base_peer_is_the_only_writer() -> None:
    landing = Landing([3], max_chunks=10)
    for notification in notifications_of(None, 2):
        landing.add(notification)
    assert landing.is_complete


def test_missing_writers_are_named() -> None:
    landing = Landing([0, 4], max_chunks=10)
    for notification in notifications_of(4, 1):
        landing.add(notification)
    assert landing.missing_writers == [0]


@pytest.mark.parametrize(
    "notification", [AuxLanded(5), AuxLanded(5, 2), ChunkLanded(5, 0, True), ChunkLanded(5, 10, False, 0)]
)
def test_strangers_are_refused(notification: Notification) -> None:
    with pytest.raises(ForeignFrame):
        Landing([0, 1], max_chunks=10).add(notification)


@pytest.mark.parametrize(
    "first,second",
    [
        ((2, True), (3, True)),
        ((2, True), (3, False)),
        ((2, True), (2, False)),
        ((2, False), (2, True)),
        ((2, False), (1, True)),
        ((0, False), (0, True)),
    ],
)
def test_contradictions_are_refused(first: tuple[int, bool], second: tuple[int, bool]) -> None:
    landing = Landing([0], max_chunks=10)
    landing.add(ChunkLanded(5, *first, 0))
    with pytest.raises(ForeignFrame):
        landing.add(ChunkLanded(5, *second, 0))
    assert not landing.is_complete
