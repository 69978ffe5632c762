"""Rooms: the numbers under which two engines meet. Who is in one, which are over, and how a request names its own.

Owns a bounded table with tombstones, and the expansion of a request's `bootstrap_*` fields. Knows no sockets, no
clocks, and nothing of what a room holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from diptych.errors import InvariantError, Overloaded, RequestError
from diptych.transfer.extension import MAX_ROOM

DEFAULT_BOOTSTRAP_PORT = 8998

Entry = TypeVar("Entry")
Value = TypeVar("Value")


class RoomTaken(RequestError):
    """The room is in use, or was: a retry needs a new one."""

    status = 409
    code = "room_taken"


class RoomTable(Generic[Entry]):
    """The open rooms of one engine and the tombstones of those that ended. One owner, one thread.

    max_rooms, max_tombstones: bounds; the oldest tombstone goes first. num_late: news for dead rooms; num_unknown: for
    rooms never seen; num_duplicates: rooms refused as taken.
    """

    def __init__(self, max_rooms: int, *, max_tombstones: int) -> None:
        self.max_rooms = max_rooms
        self.max_tombstones = max_tombstones
        self.num_late = 0
        self.num_unknown = 0
        self.num_duplicates = 0
        self._open: dict[int, Entry] = {}
        self._dead: dict[int, None] = {}  # in order of death

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[tuple[int, Entry]]:
        """Every open room and its entry, oldest first; the table may change meanwhile."""
        return iter(list(self._open.items()))

    @property
    def num_free(self) -> int:
        """Rooms that can still be opened."""
        return self.max_rooms - len(self._open)

    def open(self, room: int, entry: Entry) -> Entry:
        """Open a room. Raises RoomTaken if it is or was open, Overloaded if there are too many; neither changes it."""
        if room in self._open or room in self._dead:
            self.num_duplicates += 1
            state = "open already" if room in self._open else "over"
            raise RoomTaken(f"bootstrap_room {room} is {state}; use a new room for every try", "bootstrap_room")
        if not self.num_free:
            raise Overloaded(f"all {self.max_rooms} rooms are in use; try again later")
        self._open[room] = entry
        return entry

    def is_dead(self, room: int) -> bool:
        """Whether the room ended, as far as tombstones reach."""
        return room in self._dead

    def find(self, room: int) -> Entry | None:
        """The entry of an open room; None, and counted, for any other: news that came too late, or from a stranger."""
        entry = self._open.get(room)
        if entry is None:
            self.num_late += room in self._dead
            self.num_unknown += room not in self._dead
        return entry

    def peek(self, room: int) -> Entry | None:
        """The entry of an open room, without counting a miss."""
        return self._open.get(room)

    def close(self, room: int) -> Entry:
        """End an open room and leave a tombstone. Raises InvariantError if it is not open."""
        entry = self._open.pop(room, None)
        if entry is None:
            raise InvariantError(f"room {room} was closed but is not open")
        self._dead[room] = None
        while len(self._dead) > self.max_tombstones:
            del self._dead[next(iter(self._dead))]
        return entry


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where one sequence meets its prefill engine. room: None where decode drives and makes one."""

    host: str
    port: int
    room: int | None


def expand_rooms(bootstrap_room: int | Sequence[int], num_sequences: int) -> list[int]:
    """One room a sequence: a list as it is, a scalar as room, room + 1, ... modulo 2**63.

    Raises RequestError naming bootstrap_room for a list of another length, a number outside 63 bits, or a room named
    twice.
    """
    if isinstance(bootstrap_room, int):
        rooms = [(bootstrap_room + index) & MAX_ROOM for index in range(num_sequences)]
        numbers: Sequence[int] = [bootstrap_room]
    else:
        rooms = _of_length(bootstrap_room, num_sequences, "bootstrap_room")
        numbers = rooms
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_ROOM:
            raise RequestError(f"bootstrap_room must be within 0 and 2**63 - 1, got {number!r}", "bootstrap_room")
    if len(set(rooms)) != len(rooms):
        raise RequestError(
            f"bootstrap_room names a room twice among {len(rooms)}; each needs its own", "bootstrap_room"
        )
    return rooms


def expand_rendezvous(
    host: str | Sequence[str] | None,
    port: int | Sequence[int | None] | None,
    *,
    room: int | Sequence[int] | None,
    num_sequences: int,
    default_port: int = DEFAULT_BOOTSTRAP_PORT,
) -> list[Rendezvous | None]:
    """Where each of a request's `num_sequences` (prompts times n) meets its prefill engine; None: nowhere, unified.

    A scalar holds for all, a list must name each. A null port is `default_port`. Raises RequestError naming the field
    that is wrong.
    """
    if host is None:
        if room is not None:
            raise RequestError("bootstrap_room needs a bootstrap_host; send both or neither", "bootstrap_host")
        return [None] * num_sequences
    hosts = [host] * num_sequences if isinstance(host, str) else _of_length(host, num_sequences, "bootstrap_host")
    ports = (
        [port] * num_sequences
        if port is None or isinstance(port, int)
        else _of_length(port, num_sequences, "bootstrap_port")
    )
    rooms: Sequence[int | None] = [None] * num_sequences if room is None else expand_rooms(room, num_sequences)
    for name in hosts:
        if not isinstance(name, str) or not name:
            raise RequestError(f"bootstrap_host must be a host's name or address, got {name!r}", "bootstrap_host")
    return [
        Rendezvous(name, _port(number, default_port), number_of_room)
        for name, number, number_of_room in zip(hosts, ports, rooms, strict=True)
    ]


def _of_length(values: Sequence[Value], count: int, param: str) -> list[Value]:
    if len(values) != count:
        raise RequestError(f"{param} has {len(values)} entries for {count} sequences; send one for each", param)
    return list(values)


def _port(port: int | None, default_port: int) -> int:
    if port is None:
        return default_port
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise RequestError(f"bootstrap_port must be within 1 and 65535, got {port!r}", "bootstrap_port")
    return port
