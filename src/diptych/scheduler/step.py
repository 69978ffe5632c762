"""What a scheduler works with besides sequences: its limits, a step being planned, its counters. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.core.batch import Admission, Batch, SequenceStep
from diptych.core.sequence import Sequence
from diptych.scheduler.seats import Seats


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Resolved numbers of one engine; see `SchedulerConfig` for their meaning.

    awaits_tokens: a sequence decodes on only when its last token has come back, and batches carry such tokens, for
    there are pipeline stages. max_drafts: of a sequence in one step; with any, at most one step is in flight.
    adapts_drafts: fewer where they do not pay.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_inflight_steps: int
    max_queued_requests: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    policy: str = "fcfs"
    request_timeout: float | None = None
    awaits_tokens: bool = False
    max_loras: int = 0
    max_drafts: int = 0
    adapts_drafts: bool = True


@dataclass(slots=True)
class StepDraft:
    """A step being planned: the token budget left, admissions, and rows by sequence."""

    budget: int
    admissions: list[Admission] = field(default_factory=list)
    rows: dict[Sequence, SequenceStep] = field(default_factory=dict)

    def batch(self, step_id: int, seats: Seats) -> Batch:
        """What the worker is told, of these rows and of what has become of the seats."""
        releases, tokens, placements = seats.take_releases(), seats.take_tokens(), seats.take_placements()
        return Batch(step_id, releases, self.admissions, list(self.rows.values()), tokens, placements)


@dataclass(slots=True)
class Counters:
    """Totals since start, as `EngineLoad` reports them."""

    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefix_queries_total: int = 0
    generation_tokens_total: int = 0
    retractions_total: int = 0
    verifications_total: int = 0
    drafts_total: int = 0
    accepted_drafts_total: int = 0
