"""The two sides on which a scheduler touches other engines. Roles are composition: `Scheduler(source=..., sink=...)`.

Sequence states LOADING and SENDING exist only between these calls; a unified engine uses `LocalPrefill` and `NoSink`.
News is polled, on the engine's thread, before a step is planned.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from diptych.core.batch import RowOutput
from diptych.core.sequence import Sequence
from diptych.errors import DiptychError
from diptych.kv.cache import SequencePages


class Begin(enum.Enum):
    """Where a prompt is computed."""

    HERE = "here"
    ELSEWHERE = "elsewhere"
    LATER = "later"  # the peer has no room for it now: it waits at the head of the queue


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A peer has sampled the first token of a LOADING sequence; its pages may still be on their way.

    num_cached_tokens: prompt tokens that the peer took from its prefix cache.
    """

    sequence: Sequence
    row: RowOutput
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Landed:
    """The pages of a LOADING sequence hold the KV of its prompt; its first token was told before. They are ours
    again.
    """

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A LOADING sequence will not be filled.

    error: why it must fail; None: its prompt is computed here. keeps_pages: writes may still land, so its pages pass to
    the source (`PrefillSource.keep`) until they come back through `freed_pages`; else they are ours again.
    """

    sequence: Sequence
    error: DiptychError | None = None
    keeps_pages: bool = False


SourceNews = FirstToken | Landed | GaveUp


class PrefillSource(Protocol):
    """Who computes the prompts of new sequences."""

    def wants(self, sequence: Sequence) -> bool:
        """Whether `begin` may yet start to fill the pages of this waiting sequence from elsewhere."""
        ...

    def begin(self, sequence: Sequence, pages: SequencePages) -> Begin:
        """Start to fill `pages` from elsewhere if this prompt is to come from there; ELSEWHERE makes it LOADING."""
        ...

    def news(self) -> list[SourceNews]:
        """What has happened to LOADING sequences since the last call, in order."""
        ...

    def keep(self, sequence: Sequence, pages: list[int]) -> None:
        """Take over pages in which a write may still land."""
        ...

    def freed_pages(self) -> list[int]:
        """Kept pages in which no write can land any more, since the last call."""
        ...

    def cancel(self, sequence: Sequence) -> None:
        """Give up a LOADING sequence; it still ends with Landed or GaveUp, soon: its pages may stay longer. Or tell the
        peer of a waiting one that it `wants`, of which nothing more will be heard.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A SENDING sequence has arrived, or failed with `error`: nobody reads its pages any more."""

    sequence: Sequence
    error: DiptychError | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody wants this request any more, wherever it is; error: what to answer, None: as after an abort."""

    request_id: str
    error: DiptychError | None = field(default=None)


SinkNews = Sent | Dropped


class PageSink(Protocol):
    """Who gets computed pages."""

    def wants(self, sequence: Sequence) -> bool:
        """Whether this sequence is decoded elsewhere: after its first token it becomes SENDING instead of decoding."""
        ...

    def computed(self, sequence: Sequence, pages: SequencePages) -> None:
        """A step has finished on the device: the KV of `sequence.num_confirmed_tokens` tokens may be read."""
        ...

    def sampled(self, sequence: Sequence, row: RowOutput) -> None:
        """The whole prompt is computed and its first token known. The sequence is SENDING from now on."""
        ...

    def is_reading(self, sequence: Sequence) -> bool:
        """Whether a write reads the sequence's pages now: it must not be retracted."""
        ...

    def news(self) -> list[SinkNews]:
        """What has happened since the last call, in order."""
        ...

    def cancel(self, sequence: Sequence) -> None:
        """A wanted sequence has been answered with an abort or an error; if it is SENDING, it still ends with Sent."""
        ...
