"""Prometheus metrics of one server and its engine, under the names that vLLM's or SGLang's dashboards expect.

Gauges and counters of the engine are read from its latest load report when someone scrapes; histograms are fed as
requests go. Owns its registry: nothing global, so that several servers can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from diptych.core.batch import Speculation
from diptych.core.messages import EngineInfo, EngineLoad, TransferLoad

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_TOKEN_LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    10.0,
)
_TOKEN_COUNT_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def kv_usage(load: EngineLoad) -> float:
    """Share of the KV pool that running sequences hold, 0 to 1; cached pages that can be evicted count as free."""
    return _ratio(load.num_owned_pages, load.num_pages)


def cache_hit_rate(load: EngineLoad) -> float:
    """Share of the prompt tokens looked up in the prefix cache that it held, since the engine started."""
    return _ratio(load.cached_tokens_total, load.prefix_queries_total)


def accept_length(load: EngineLoad) -> float:
    """Mean tokens that a row with drafts yielded, its own one included; 0 without any."""
    return _speculation_of(load).accept_length


def accept_rate(load: EngineLoad) -> float:
    """Share of the drafts that were accepted."""
    return _speculation_of(load).accept_rate


def _speculation_of(load: EngineLoad) -> Speculation:
    return Speculation(load.verifications_total, load.drafts_total, load.accepted_drafts_total)


@dataclass(frozen=True)
class _Reading:
    """One number of a load report and its names. A name of None: that family does not have it."""

    vllm: str | None
    sglang: str | None
    text: str
    read: Callable[[EngineLoad], float]
    is_counter: bool = False


_READINGS = (
    _Reading("num_requests_running", "num_running_reqs", "Requests in the batch.", lambda load: load.num_running),
    _Reading("num_requests_waiting", "num_queue_reqs", "Requests that wait.", lambda load: load.num_waiting),
    _Reading("kv_cache_usage_perc", "token_usage", "Share of the KV pool in use, 0 to 1.", kv_usage),
    _Reading(
        None, "num_used_tokens", "Tokens of the KV pool in use.", lambda load: load.num_owned_pages * load.page_size
    ),
    _Reading(
        None, "max_total_num_tokens", "Tokens that fit the KV pool.", lambda load: load.num_pages * load.page_size
    ),
    _Reading(None, "gen_throughput", "Output tokens a second.", lambda load: load.generation_tokens_per_s),
    _Reading(None, "cache_hit_rate", "Share of looked-up tokens that the prefix cache held.", cache_hit_rate),
    _Reading(
        None,
        "utilization",
        "Share of the batch's places in use.",
        lambda load: _ratio(load.num_slots - load.num_free_slots, load.num_slots),
    ),
    _Reading("prompt_tokens", "prompt_tokens", "Prompt tokens processed.", lambda load: load.prompt_tokens_total, True),
    _Reading(
        "prompt_tokens_cached", None, "Prompt tokens taken from the cache.", lambda load: load.cached_tokens_total, True
    ),
    _Reading(
        "generation_tokens", "generation_tokens", "Tokens generated.", lambda load: load.generation_tokens_total, True
    ),
    _Reading(
        "prefix_cache_queries", None, "Tokens looked up in the cache.", lambda load: load.prefix_queries_total, True
    ),
    _Reading("prefix_cache_hits", None, "Tokens found in the cache.", lambda load: load.cached_tokens_total, True),
    _Reading(
        "num_preemptions",
        "num_retracted_reqs",
        "Retractions for lack of pages.",
        lambda load: load.retractions_total,
        True,
    ),
    _Reading(
        "spec_decode_num_drafts",
        "spec_verify_calls",
        "Rows that verified drafts.",
        lambda load: load.verifications_total,
        True,
    ),
    _Reading(
        "spec_decode_num_draft_tokens", "spec_draft_tokens", "Tokens drafted.", lambda load: load.drafts_total, True
    ),
    _Reading(
        "spec_decode_num_accepted_tokens",
        "spec_accepted_tokens",
        "Drafts accepted.",
        lambda load: load.accepted_drafts_total,
        True,
    ),
    _Reading(None, "spec_accept_length", "Mean tokens of a row that verified drafts.", accept_length),
    _Reading(None, "spec_accept_rate", "Share of the drafts that were accepted.", accept_rate),
    _Reading("engine_steps", "engine_steps", "Steps that the engine ran.", lambda load: load.steps_total, True),
    _Reading(
        "engine_host_seconds",
        "engine_host_seconds",
        "Time of the engine's own work.",
        lambda load: load.host_s_total,
        True,
    ),
    _Reading(
        "engine_compute_seconds",
        "engine_compute_seconds",
        "Time of the worker.",
        lambda load: load.compute_s_total,
        True,
    ),
)


@dataclass(frozen=True)
class _TransferReading:
    """One number of transfers between engines, under the same name in every family."""

    name: str
    text: str
    read: Callable[[TransferLoad], float]
    is_counter: bool = False


_TRANSFER_READINGS = (
    _TransferReading(
        "num_prefill_bootstrap_queue_reqs",
        "Prompts whose decode engine has not named their room yet.",
        lambda load: load.num_outgoing_waiting,
    ),
    _TransferReading(
        "num_prefill_inflight_queue_reqs",
        "Prompts that are computed or sent for a decode engine.",
        lambda load: load.num_outgoing_rooms - load.num_outgoing_waiting,
    ),
    _TransferReading(
        "num_decode_prealloc_queue_reqs",
        "Requests that wait for pages which a prefill engine is to fill.",
        lambda load: load.num_incoming_waiting,
    ),
    _TransferReading(
        "num_decode_transfer_queue_reqs",
        "Prompts that a prefill engine computes or sends for this one.",
        lambda load: load.num_incoming_rooms,
    ),
    _TransferReading("kv_transfer_free_rooms", "Rooms that can be opened.", lambda load: load.num_free_rooms),
    _TransferReading(
        "kv_transfer_quarantined_pages", "Pages that a peer may still write.", lambda load: load.num_quarantined_pages
    ),
    _TransferReading("kv_transfer_peers", "Engines that this one deals with.", lambda load: load.num_peers),
    _TransferReading("kv_transfer_lost_peers", "Engines that are silent.", lambda load: load.num_lost_peers),
    _TransferReading("kv_transfer_rooms_done", "Rooms that were delivered.", lambda load: load.rooms_done_total, True),
    _TransferReading(
        "kv_transfer_foreign_frames",
        "Messages on the control socket that were dropped.",
        lambda load: load.foreign_frames_total,
        True,
    ),
    _TransferReading(
        "num_transfer_failed_reqs", "Transfers that failed.", lambda load: sum(load.failures_total.values()), True
    ),
)
# vLLM has histograms of these; of ours the count and the sum are known. Name, text, sum.
_VLLM_TRANSFERS: tuple[tuple[str, str, Callable[[TransferLoad], float]], ...] = (
    ("nixl_xfer_time_seconds", "Time of KV writes.", lambda load: load.transfer_s_total),
    ("nixl_bytes_transferred", "Bytes of KV writes.", lambda load: load.bytes_sent_total),
    ("nixl_num_descriptors", "Descriptors of KV writes.", lambda load: load.descriptors_total),
)


class TransferSpeed:
    """How fast KV moved when it last did, from two reports of totals. Gigabytes a second; mean milliseconds a write."""

    def __init__(self) -> None:
        self.gb_per_s = 0.0
        self.latency_ms = 0.0
        self._before = TransferLoad()

    def note(self, load: TransferLoad) -> None:
        """The latest totals."""
        num_writes = load.writes_total - self._before.writes_total
        seconds = load.transfer_s_total - self._before.transfer_s_total
        if num_writes > 0 and seconds > 0.0:
            self.gb_per_s = (load.bytes_sent_total - self._before.bytes_sent_total) / seconds / 1e9
            self.latency_ms = 1e3 * seconds / num_writes
        self._before = load


class _LoadCollector(Collector):
    """Turns the latest load report into gauges and counters at the moment of a scrape."""

    def __init__(self, family: str, labels: dict[str, str]) -> None:
        self.speed = TransferSpeed()
        self._family = family
        self._names = list(labels)
        self._values = list(labels.values())
        self.load: EngineLoad | None = None
        self.info: EngineInfo | None = None

    def collect(self) -> Iterator[Metric]:
        if self.info is not None:
            yield self._cache_config(self.info)
        if self.load is None:
            return
        for reading in _READINGS:
            name = reading.sglang if self._family == "sglang" else reading.vllm
            if name is None:
                continue
            yield self._number(name, reading.text, reading.read(self.load), is_counter=reading.is_counter)
        if self._family == "sglang":
            yield self._cached_tokens(self.load)
        if self.load.transfer is not None:
            yield from self._transfers(self.load.transfer)

    def _transfers(self, load: TransferLoad) -> Iterator[Metric]:
        for reading in _TRANSFER_READINGS:
            yield self._number(reading.name, reading.text, reading.read(load), is_counter=reading.is_counter)
        yield self._number("kv_transfer_speed_gb_s", "Speed of the latest KV writes.", self.speed.gb_per_s)
        yield self._number("kv_transfer_latency_ms", "Mean time of the latest KV writes.", self.speed.latency_ms)
        yield self._number("kv_transfer_total_mb", "Megabytes of KV sent.", load.bytes_sent_total / 1e6)
        failures = CounterMetricFamily(
            f"{self._family}:kv_transfer_failures", "Transfers that failed.", labels=[*self._names, "cause"]
        )
        for cause, count in load.failures_total.items():
            failures.add_metric([*self._values, cause], float(count))
        yield failures
        if self._family == "sglang":
            return
        expired = load.failures_total.get("EXPIRED", 0)
        yield self._number("nixl_num_kv_expired_reqs", "Transfers that were late.", expired, is_counter=True)
        for name, text, read in _VLLM_TRANSFERS:
            histogram = HistogramMetricFamily(f"{self._family}:{name}", text, labels=self._names)
            histogram.add_metric(self._values, [("+Inf", float(load.writes_total))], read(load))
            yield histogram

    def _number(self, name: str, text: str, value: float, *, is_counter: bool = False) -> Metric:
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        metric = kind(f"{self._family}:{name}", text, labels=self._names)
        metric.add_metric(self._values, float(value))
        return metric

    def _cache_config(self, info: EngineInfo) -> Metric:
        names = [*self._names, "block_size", "num_gpu_blocks"]
        metric = GaugeMetricFamily(f"{self._family}:cache_config_info", "Shape of the KV pool.", labels=names)
        metric.add_metric([*self._values, str(info.page_size), str(info.num_pages)], 1.0)
        return metric

    def _cached_tokens(self, load: EngineLoad) -> Metric:
        text = "Prompt tokens taken from a cache."
        metric = CounterMetricFamily("sglang:cached_tokens", text, labels=[*self._names, "cache_source"])
        metric.add_metric([*self._values, "device"], float(load.cached_tokens_total))
        return metric


@dataclass(kw_only=True, slots=True)
class RequestTimes:
    """What a finished sequence reports. Times in seconds; `ttft_s` is None if no token came."""

    num_prompt_tokens: int
    num_output_tokens: int
    e2e_s: float
    ttft_s: float | None
    queue_s: float | None
    finish_reason: str


class ServerMetrics:
    """All metrics of a server.

    Args: family: whose names. model_name: the label that dashboards filter on. engine_type: the role at the start.
    """

    def __init__(self, family: str, model_name: str, *, engine_type: str = "unified") -> None:
        labels = {"model_name": model_name}
        if family == "sglang":
            labels |= {"engine_type": engine_type, "tp_rank": "0", "pp_rank": "0"}
        else:
            labels |= {"engine": "0"}
        self.registry = CollectorRegistry()
        self._labels = labels
        self._family = family
        self._collector = _LoadCollector(family, labels)
        self.registry.register(self._collector)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two outputs.", _TOKEN_LATENCY_BUCKETS_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first.", _TOKEN_LATENCY_BUCKETS_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY_BUCKETS_S)
        queue_name = "queue_time_seconds" if family == "sglang" else "request_queue_time_seconds"
        self._queue = self._histogram(queue_name, "Arrival to first step.", _LATENCY_BUCKETS_S)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt length.", _TOKEN_COUNT_BUCKETS)
        self._output = self._histogram("request_generation_tokens", "Output length.", _TOKEN_COUNT_BUCKETS)
        self._ends = self._end_counters()
        self._missed = self._counter("num_bootstrap_failed_reqs", "Sequences whose prefill engine was not found.")
        self._local = self._counter("num_local_prefill_reqs", "Of these, sequences whose prompt is computed here.")

    def note_ready(self, info: EngineInfo) -> None:
        """The engine is up; its KV pool has this shape."""
        self._collector.info = info

    def note_load(self, load: EngineLoad) -> None:
        """The engine's latest report."""
        self._collector.load = load
        if load.transfer is not None:
            self._collector.speed.note(load.transfer)

    @property
    def transfer_speed(self) -> TransferSpeed:
        """How fast KV moves."""
        return self._collector.speed

    def note_missed_prefill(self, is_local: bool) -> None:
        """A sequence's prefill engine was not found; is_local: its prompt is computed here."""
        self._missed.labels(**self._labels).inc()
        if is_local:
            self._local.labels(**self._labels).inc()

    def note_gap(self, seconds: float) -> None:
        """Time between two outputs of one sequence."""
        self._itl.observe(seconds)

    def note_finished(self, times: RequestTimes) -> None:
        """One sequence has ended, for whatever reason."""
        for counter in self._ends(times.finish_reason):
            counter.inc()
        self._e2e.observe(times.e2e_s)
        self._prompt.observe(times.num_prompt_tokens)
        self._output.observe(times.num_output_tokens)
        if times.queue_s is not None:
            self._queue.observe(times.queue_s)
        if times.ttft_s is None:
            return
        self._ttft.observe(times.ttft_s)
        if times.num_output_tokens > 1:
            self._tpot.observe((times.e2e_s - times.ttft_s) / (times.num_output_tokens - 1))

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"{self._family}:{name}", text, labelnames=list(self._labels), buckets=buckets, registry=self.registry
        )
        return metric.labels(**self._labels)

    def _end_counters(self) -> Callable[[str], list[Counter]]:
        if self._family != "sglang":
            ends = self._counter("request_success", "Finished requests.", "finished_reason")
            return lambda reason: [ends.labels(**self._labels, finished_reason=reason)]
        every = self._counter("num_requests", "Finished requests.").labels(**self._labels)
        aborted = self._counter("num_aborted_requests", "Aborted requests.").labels(**self._labels)
        return lambda reason: [every, aborted] if reason == "abort" else [every]

    def _counter(self, name: str, text: str, *more_labels: str) -> Counter:
        return Counter(f"{self._family}:{name}", text, labelnames=[*self._labels, *more_labels], registry=self.registry)
