"""When a room is complete, whatever the order of its notifications."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.transfer.extension import ForeignFrame
from diptych.transfer.landing import Landing
from diptych.transfer.wire import AuxLanded, ChunkLanded, Notification


def chunks_of(writer: int | None, num_chunks: int) -> list[Notification]:
    return [ChunkLanded(5, chunk, chunk == num_chunks - 1, writer) for chunk in range(num_chunks)]


@settings(deadline=None)
@given(st.data())
def test_any_order_and_duplicates(data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, 7), st.integers(0, 3))
    sizes = data.draw(st.dictionaries(pairs, st.integers(1, 5), min_size=1, max_size=4))
    needed = [(item, reader) for (writer, reader), size in sizes.items() for item in chunks_of(writer, size)]
    needed.append((AuxLanded(5, 0), 0))
    order = data.draw(st.permutations(needed + data.draw(st.lists(st.sampled_from(needed), max_size=4))))
    known_at = data.draw(st.integers(0, len(order)))
    landing = Landing(None, max_chunks=10)
    seen: set[tuple[Notification, int]] = set()
    for index, (notification, reader) in enumerate(order):
        if index == known_at:
            landing.expect(sizes)
        assert landing.add(notification, reader) == ((notification, reader) not in seen)
        seen.add((notification, reader))
        assert landing.is_complete == (seen == set(needed) and index >= known_at)
    landing.expect(sizes)
    assert landing.is_complete and not landing.missing_streams
    assert landing.num_duplicates == len(order) - len(needed)


def test_missing_streams_are_named() -> None:
    landing = Landing([(0, 1), (4, 1)], max_chunks=10)
    for notification in chunks_of(4, 1):
        landing.add(notification, 1)
    assert landing.missing_streams == [(0, 1)]


def test_strangers_are_forgotten_once_it_is_known_who_writes() -> None:
    landing = Landing(None, max_chunks=10)
    for notification in [*chunks_of(3, 2), *chunks_of(0, 1), AuxLanded(5, 0)]:
        landing.add(notification)
    assert not landing.is_complete
    landing.expect([(0, 0)])
    assert landing.is_complete


@pytest.mark.parametrize(
    ("notification", "reader"),
    [
        (AuxLanded(5, 2), 0),
        (AuxLanded(5, 0), 1),
        (ChunkLanded(5, 0, True), 0),
        (ChunkLanded(5, 10, False, 0), 0),
        (ChunkLanded(5, 0, True, 1), 1),
    ],
)
def test_strangers_are_refused(notification: Notification, reader: int) -> None:
    with pytest.raises(ForeignFrame):
        Landing([(0, 0), (1, 0)], max_chunks=10).add(notification, reader)


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
    landing = Landing([(0, 0)], max_chunks=10)
    landing.add(ChunkLanded(5, *first, 0))
    with pytest.raises(ForeignFrame):
        landing.add(ChunkLanded(5, *second, 0))
    assert not landing.is_complete
