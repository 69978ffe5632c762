"""What a scheduler works with besides sequences: its limits, a step being planned, its counters. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.core.batch import Admission, SequenceStep
from diptych.core.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Resolved numbers of one engine; see `SchedulerConfig` for their meaning."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_inflight_steps: int
    max_queued_requests: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    policy: str = "fcfs"
    request_timeout: float | None = None


@dataclass(slots=True)
class StepDraft:
    """A step being planned: the token budget left, admissions, and rows by sequence."""

    budget: int
    admissions: list[Admission] = field(default_factory=list)
    rows: dict[Sequence, SequenceStep] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """Totals since start, as `EngineLoad` reports them."""

    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefix_queries_total: int = 0
    generation_tokens_total: int = 0
    retractions_total: int = 0
