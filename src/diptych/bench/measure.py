"""What is measured: when each request's tokens arrived, and what follows from that.

Owns the arithmetic of latencies, rates and percentiles. Takes times as numbers of seconds; reads no clock. Knows
nothing of how requests are sent.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diptych.bench.workload import Case, Headline
from diptych.core.messages import EngineLoad

_MIN_BINS = 5
_MAX_BINS = 80
_OUTPUTS_PER_BIN = 4


class Arrival(NamedTuple):
    """Tokens that became known together. at_s: seconds since the round began."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds since the round began.

    queue_s: from arrival to the engine's first step, where the engine says so. error: what it failed with, in a few
    words that are the same for failures of the same kind.
    """

    started_s: float
    ended_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    cached_tokens: int = 0
    arrivals: tuple[Arrival, ...] = ()
    queue_s: float | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Until the first token."""
        return self.arrivals[0].at_s - self.started_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """Until the last token."""
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token after the first; None for fewer than two."""
        later = sum(arrival.num_tokens for arrival in self.arrivals[1:])
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / later if later else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between arrivals."""
        return [later.at_s - sooner.at_s for sooner, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What is said about many measurements of one thing, in its own unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """Over the values that are known; None if there are none. Percentiles interpolate linearly."""
        known = np.array([value for value in values if value is not None], dtype=np.float64)
        if not known.size:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(known, (50, 90, 99)))
        return cls(count=int(known.size), mean=float(known.mean()), p50=p50, p90=p90, p99=p99, max=float(known.max()))


class EngineTotals(NamedTuple):
    """Counters of an engine since its start; the difference of two is what happened between them."""

    steps: float
    host_s: float
    compute_s: float
    prompt_tokens: float
    cached_tokens: float
    generation_tokens: float
    retractions: float
    verifications: float = 0.0
    drafts: float = 0.0
    accepted_drafts: float = 0.0

    @classmethod
    def of(cls, load: EngineLoad) -> EngineTotals:
        """Those in a load report."""
        return cls(
            steps=load.steps_total,
            host_s=load.host_s_total,
            compute_s=load.compute_s_total,
            prompt_tokens=load.prompt_tokens_total,
            cached_tokens=load.cached_tokens_total,
            generation_tokens=load.generation_tokens_total,
            retractions=load.retractions_total,
            verifications=load.verifications_total,
            drafts=load.drafts_total,
            accepted_drafts=load.accepted_drafts_total,
        )

    def since(self, before: EngineTotals) -> EngineTotals:
        """What was added since `before`."""
        return EngineTotals(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, other: EngineTotals) -> EngineTotals:
        """Both together."""
        return EngineTotals(*(one + two for one, two in zip(self, other, strict=True)))

    @property
    def accept_length(self) -> float | None:
        """Mean tokens of a row that verified drafts."""
        return 1.0 + self.accepted_drafts / self.verifications if self.verifications else None

    @property
    def accept_rate(self) -> float | None:
        """Share of the drafts that were right."""
        return self.accepted_drafts / self.drafts if self.drafts else None

    @property
    def host_ms_per_step(self) -> float | None:
        """Time of the engine's own thread a step: the overhead of Python around the worker."""
        return 1000.0 * self.host_s / self.steps if self.steps else None

    @property
    def compute_ms_per_step(self) -> float | None:
        """Time of the worker a step."""
        return 1000.0 * self.compute_s / self.steps if self.steps else None


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of a case. engine: what it counted meanwhile, if it can be asked."""

    records: tuple[RequestRecord, ...]
    engine: EngineTotals | None = None

    @functools.cached_property
    def completed(self) -> tuple[RequestRecord, ...]:
        """Requests that did not fail; only these count in rates and latencies."""
        return tuple(record for record in self.records if record.error is None)

    @property
    def failures(self) -> Counter[str]:
        """How many requests failed with what."""
        return Counter(record.error for record in self.records if record.error is not None)

    @property
    def duration_s(self) -> float:
        """From the start of the first request to the end of the last."""
        if not self.records:
            return 0.0
        return max(record.ended_s for record in self.records) - min(record.started_s for record in self.records)

    @property
    def num_prompt_tokens(self) -> int:
        """Of completed requests."""
        return sum(record.num_prompt_tokens for record in self.completed)

    @property
    def num_output_tokens(self) -> int:
        """Of completed requests."""
        return sum(record.num_output_tokens for record in self.completed)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of completed requests that came from the prefix cache."""
        return sum(record.cached_tokens for record in self.completed)

    @property
    def input_rate(self) -> float | None:
        """Prompt tokens a second."""
        return self._rate(self.num_prompt_tokens)

    @property
    def output_rate(self) -> float | None:
        """Output tokens a second."""
        return self._rate(self.num_output_tokens)

    @property
    def request_rate(self) -> float | None:
        """Completed requests a second."""
        return self._rate(len(self.completed))

    @property
    def ms_per_token(self) -> float | None:
        """Duration over the longest output; None if no output has two tokens."""
        longest = max((record.num_output_tokens for record in self.completed), default=0)
        return 1000.0 * self.duration_s / longest if longest > 1 else None

    @functools.cached_property
    def decode_rate(self) -> float | None:
        """Output tokens a second while every request was decoding.

        That is between the latest first token and the earliest last token; None if that time is empty or some request
        has fewer than two outputs in it. The rates of the requests are added up, each between two of its own outputs,
        so that the window's edges fall inside no step.
        """
        if not self.completed or not all(record.arrivals for record in self.completed):
            return None
        begin = max(record.arrivals[0].at_s for record in self.completed)
        end = min(record.arrivals[-1].at_s for record in self.completed)
        rates = [_rate_between(record.arrivals, begin, end) for record in self.completed]
        return None if None in rates else sum(rate for rate in rates if rate is not None)

    def figure(self, headline: Headline) -> float | None:
        """The figure of that name."""
        figures = {
            Headline.INPUT_RATE: self.input_rate,
            Headline.OUTPUT_RATE: self.output_rate,
            Headline.DECODE_RATE: self.decode_rate,
            Headline.MS_PER_TOKEN: self.ms_per_token,
        }
        return figures[headline]

    def _rate(self, amount: int) -> float | None:
        return amount / self.duration_s if self.completed and self.duration_s > 0 else None


def _rate_between(arrivals: Sequence[Arrival], begin_s: float, end_s: float) -> float | None:
    inside = [arrival for arrival in arrivals if begin_s <= arrival.at_s <= end_s]
    if len(inside) < 2 or inside[-1].at_s <= inside[0].at_s:
        return None
    return sum(arrival.num_tokens for arrival in inside[1:]) / (inside[-1].at_s - inside[0].at_s)


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Distributions over requests, in seconds; itl over all gaps of all requests."""

    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    queue: Distribution | None

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Latencies:
        """Of requests that completed."""
        return cls(
            ttft=Distribution.of(record.ttft_s for record in records),
            itl=Distribution.of(gap for record in records for gap in record.itl_s),
            tpot=Distribution.of(record.tpot_s for record in records),
            e2e=Distribution.of(record.e2e_s for record in records),
            queue=Distribution.of(record.queue_s for record in records),
        )


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """A case and what its rounds came to."""

    case: Case
    rounds: tuple[Round, ...]

    @property
    def records(self) -> list[RequestRecord]:
        """Of all rounds."""
        return [record for item in self.rounds for record in item.records]

    @property
    def completed(self) -> list[RequestRecord]:
        """Of all rounds, those that did not fail."""
        return [record for item in self.rounds for record in item.completed]

    @property
    def failures(self) -> Counter[str]:
        """How many requests failed with what, over all rounds."""
        return sum((item.failures for item in self.rounds), Counter())

    def median(self, headline: Headline) -> float | None:
        """Of a figure over the rounds that have it."""
        known = self._figures(headline)
        return float(np.median(known)) if known else None

    def best(self) -> float | None:
        """The best round's headline figure: the least if it is a time, else the most."""
        known = self._figures(self.case.headline)
        if not known:
            return None
        return min(known) if self.case.headline is Headline.MS_PER_TOKEN else max(known)

    def engine(self) -> EngineTotals | None:
        """What the engine counted in all rounds together, if it can be asked."""
        known = [item.engine for item in self.rounds if item.engine is not None]
        return functools.reduce(EngineTotals.plus, known) if known else None

    def _figures(self, headline: Headline) -> list[float]:
        return [figure for item in self.rounds if (figure := item.figure(headline)) is not None]


def output_timeline(records: Sequence[RequestRecord]) -> tuple[list[float], list[float]]:
    """Output tokens a second over time: the middles of equal bins in seconds, and the rate in each.

    There are as many bins as the outputs can fill, so that a slow engine does not look like a comb.
    """
    arrivals = [arrival for record in records for arrival in record.arrivals]
    if not arrivals:
        return [], []
    most_outputs = max(len(record.arrivals) for record in records)
    num_bins = min(_MAX_BINS, max(_MIN_BINS, most_outputs // _OUTPUTS_PER_BIN))
    edges = np.linspace(0.0, max(max(arrival.at_s for arrival in arrivals), 1e-9), num_bins + 1)
    weights = [arrival.num_tokens for arrival in arrivals]
    counts, _ = np.histogram([arrival.at_s for arrival in arrivals], bins=edges, weights=weights)
    return ((edges[:-1] + edges[1:]) / 2).tolist(), (counts / (edges[1] - edges[0])).tolist()


def open_requests_timeline(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """How many requests were open: the times at which that changed, in seconds, and the number from then on."""
    changes = [(record.started_s, 1) for record in records] + [(record.ended_s, -1) for record in records]
    times, counts, count = [0.0], [0], 0
    for at_s, change in sorted(changes):
        count += change
        times.append(at_s)
        counts.append(count)
    return times, counts
