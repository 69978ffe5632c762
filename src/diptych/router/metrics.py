"""Prometheus metrics of one router, in a registry of its own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from diptych.router.config import Role
from diptych.router.member import State
from diptych.router.pool import Pool

_PREFIX = "diptych_router"
_FIRST_BYTE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_OVERHEAD_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1)


class _PoolCollector(Collector):
    """The pool as it is at the moment of a scrape."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        tally = Tally((member.role, member.state) for member in self._pool)
        engines = GaugeMetricFamily(f"{_PREFIX}_engines", "Engines by role and state.", labels=["role", "state"])
        for role in Role:
            for state in State:
                engines.add_metric([role, state], float(tally[role, state]))
        yield engines
        active = GaugeMetricFamily(f"{_PREFIX}_active_requests", "Requests open at an engine.", labels=["engine"])
        load = GaugeMetricFamily(f"{_PREFIX}_engine_load", "Requests that an engine works on.", labels=["engine"])
        for member in self._pool:
            active.add_metric([member.url], float(member.num_active))
            load.add_metric([member.url], member.load)
        yield active
        yield load
        yield GaugeMetricFamily(
            f"{_PREFIX}_local_prefill_tokens",
            "New prompt tokens below which decode engines are alone.",
            value=float(self._pool.local_prefill_tokens),
        )


class RouterMetrics:
    """All metrics of a router."""

    def __init__(self, pool: Pool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(pool))
        self._requests = self._counter(
            "requests", "Attempts, by the engine asked and how it went.", "engine", "outcome"
        )
        self._retries = self._counter("retries", "Attempts after the first, by what ended the one before.", "reason")
        self._refused = self._counter("refused", "Requests that no engine was asked to take.", "reason")
        self._prefills = self._counter("prefills", "Attempts, by where the prompt is computed.", "place")
        self._first_byte = self._histogram("time_to_first_byte_seconds", "Arrival to the first byte.", _FIRST_BYTE_S)
        self._overhead = self._histogram("overhead_seconds", "From the body's end to the first attempt.", _OVERHEAD_S)

    def note_attempt(self, engine: str, outcome: str) -> None:
        """An attempt is over."""
        self._requests.labels(engine, outcome).inc()

    def note_retry(self, reason: str) -> None:
        """A request is tried once more."""
        self._retries.labels(reason).inc()

    def note_refused(self, reason: str) -> None:
        """Nobody was asked."""
        self._refused.labels(reason).inc()

    def note_choice(self, *, is_remote: bool, overhead_s: float | None) -> None:
        """A request goes out; overhead_s: None for a retry."""
        self._prefills.labels("prefill" if is_remote else "local").inc()
        if overhead_s is not None:
            self._overhead.observe(overhead_s)

    def note_first_byte(self, seconds: float) -> None:
        """The client gets something."""
        self._first_byte.observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, buckets=buckets, registry=self._registry)
