"""Ports of a unified engine: prompts are computed here, pages go nowhere."""

from __future__ import annotations

from diptych.core.batch import RowOutput
from diptych.core.sequence import Sequence
from diptych.errors import InvariantError
from diptych.kv.cache import SequencePages
from diptych.scheduler.ports import Begin, SinkNews, SourceNews


class LocalPrefill:
    """A PrefillSource that leaves every prompt to this engine."""

    def wants(self, sequence: Sequence) -> bool:
        return False

    def begin(self, sequence: Sequence, pages: SequencePages) -> Begin:
        return Begin.HERE

    def news(self) -> list[SourceNews]:
        return []

    def keep(self, sequence: Sequence, pages: list[int]) -> None:
        raise InvariantError(f"request {sequence.request_id} is not loaded from anywhere")

    def freed_pages(self) -> list[int]:
        return []

    def cancel(self, sequence: Sequence) -> None:
        raise InvariantError(f"request {sequence.request_id} is not loaded from anywhere")


class NoSink:
    """A PageSink for sequences that stay."""

    def wants(self, sequence: Sequence) -> bool:
        return False

    def computed(self, sequence: Sequence, pages: SequencePages) -> None:
        """Nobody waits for pages."""

    def sampled(self, sequence: Sequence, row: RowOutput) -> None:
        raise InvariantError(f"request {sequence.request_id} is sent nowhere")

    def is_reading(self, sequence: Sequence) -> bool:
        return False

    def news(self) -> list[SinkNews]:
        return []

    def cancel(self, sequence: Sequence) -> None:
        raise InvariantError(f"request {sequence.request_id} is sent nowhere")
