"""Both ports of a scheduler, played by hand: a peer that fills pages, and one that takes them."""

from __future__ import annotations

from diptych.core.batch import RowOutput
from diptych.core.sequence import Sequence
from diptych.kv.cache import SequencePages
from diptych.scheduler.ports import Begin, SinkNews, SourceNews


class PeerPrefill:
    """A PrefillSource that fills pages in the worker's memory when told to."""

    def __init__(self) -> None:
        self.begun: list[tuple[Sequence, SequencePages]] = []
        self.cancelled: list[Sequence] = []
        self.pending: list[SourceNews] = []
        self.kept: list[int] = []
        self.freed: list[int] = []
        self.answer = Begin.ELSEWHERE

    def wants(self, sequence: Sequence) -> bool:
        return not sequence.num_output_tokens and sequence not in [begun for begun, _ in self.begun]

    def begin(self, sequence: Sequence, pages: SequencePages) -> Begin:
        if sequence.num_output_tokens or sequence in [begun for begun, _ in self.begun]:
            return Begin.HERE
        if self.answer is Begin.ELSEWHERE:
            self.begun.append((sequence, pages))
        return self.answer

    def news(self) -> list[SourceNews]:
        news, self.pending = self.pending, []
        return news

    def keep(self, sequence: Sequence, pages: list[int]) -> None:
        self.kept += pages

    def freed_pages(self) -> list[int]:
        freed, self.freed = self.freed, []
        return freed

    def cancel(self, sequence: Sequence) -> None:
        self.cancelled.append(sequence)


class PeerSink:
    """A PageSink that decodes everything elsewhere."""

    def __init__(self) -> None:
        self.progress: list[int] = []
        self.first_tokens: list[list[int]] = []
        self.sampled_sequences: list[Sequence] = []
        self.pending: list[SinkNews] = []
        self.cancelled: list[Sequence] = []

    def wants(self, sequence: Sequence) -> bool:
        return True

    def computed(self, sequence: Sequence, pages: SequencePages) -> None:
        self.progress.append(sequence.num_confirmed_tokens)

    def sampled(self, sequence: Sequence, row: RowOutput) -> None:
        self.sampled_sequences.append(sequence)
        self.first_tokens.append(row.token_ids)

    def is_reading(self, sequence: Sequence) -> bool:
        return False

    def news(self) -> list[SinkNews]:
        news, self.pending = self.pending, []
        return news

    def cancel(self, sequence: Sequence) -> None:
        self.cancelled.append(sequence)
