"""Metric names of every family, and what the numbers are made of."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych.core.messages import EngineLoad, TransferLoad
from diptych.metrics import RequestTimes, ServerMetrics

LOAD = EngineLoad(
    timestamp=1.0,
    num_running=3,
    num_waiting=4,
    num_pages=100,
    num_owned_pages=25,
    page_size=16,
    num_slots=8,
    num_free_slots=6,
    prompt_tokens_total=1000,
    cached_tokens_total=300,
    prefix_queries_total=600,
    generation_tokens_total=50,
    retractions_total=2,
)


def samples(metrics: ServerMetrics) -> dict[str, float]:
    text = metrics.render()[0].decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def finished(reason: str, **changes) -> RequestTimes:
    values = {"num_prompt_tokens": 7, "num_output_tokens": 5, "e2e_s": 1.0, "ttft_s": 0.2, "queue_s": 0.1}
    return RequestTimes(finish_reason=reason, **{**values, **changes})


EXPECTED = {
    "vllm": {
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 4, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 1000, "vllm:generation_tokens_total": 50, "vllm:prefix_cache_queries_total": 600,
        "vllm:prefix_cache_hits_total": 300, "vllm:num_preemptions_total": 2,
        "vllm:request_queue_time_seconds_sum": 0.1,
        "vllm:time_to_first_token_seconds_sum": 0.2, "vllm:e2e_request_latency_seconds_sum": 1.0,
        "vllm:request_time_per_output_token_seconds_sum": 0.2, "vllm:inter_token_latency_seconds_sum": 0.05,
        "vllm:request_success_total": 1, "vllm:request_prompt_tokens_sum": 7, "vllm:request_generation_tokens_sum": 5,
    },
    "sglang": {
        "sglang:num_running_reqs": 3, "sglang:num_queue_reqs": 4, "sglang:token_usage": 0.25,
        "sglang:num_used_tokens": 400,
        "sglang:cache_hit_rate": 0.5, "sglang:utilization": 0.25, "sglang:max_total_num_tokens": 1600,
        "sglang:cached_tokens_total": 300, "sglang:num_requests_total": 1, "sglang:queue_time_seconds_sum": 0.1,
        "sglang:num_aborted_requests_total": 0, "sglang:time_to_first_token_seconds_sum": 0.2,
    },
    "diptych": {"diptych:num_requests_running": 3, "diptych:kv_cache_usage_perc": 0.25,
        "diptych:request_success_total": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", list(EXPECTED))
def test_names_and_values(family):
    metrics = ServerMetrics(family, "m")
    metrics.note_load(LOAD)
    metrics.note_gap(0.05)
    metrics.note_finished(finished("stop"))
    found = samples(metrics)
    for name, value in EXPECTED[family].items():
        assert found[name] == pytest.approx(value), name
    assert all(name.startswith(f"{family}:") for name in found)


def test_every_sample_names_the_model():
    metrics = ServerMetrics("vllm", "m")
    metrics.note_load(LOAD)
    text = metrics.render()[0].decode()
    for family in text_string_to_metric_families(text):
        assert all(sample.labels["model_name"] == "m" for sample in family.samples)


def test_aborts_are_counted_apart():
    metrics = ServerMetrics("sglang", "m")
    metrics.note_finished(finished("abort", ttft_s=None, queue_s=None, num_output_tokens=0))
    found = samples(metrics)
    assert found["sglang:num_aborted_requests_total"] == 1 and found["sglang:time_to_first_token_seconds_count"] == 0


def test_two_servers_do_not_share_numbers():
    first, second = ServerMetrics("vllm", "a"), ServerMetrics("vllm", "a")
    first.note_gap(1.0)
    assert samples(second)["vllm:inter_token_latency_seconds_count"] == 0


def test_an_empty_load_divides_by_nothing():
    metrics = ServerMetrics("sglang", "m")
    metrics.note_load(EngineLoad(timestamp=0.0))
    assert samples(metrics)["sglang:token_usage"] == 0


TRANSFER = TransferLoad(
    num_outgoing_rooms=5,
    num_outgoing_waiting=2,
    num_incoming_rooms=3,
    writes_total=4,
    bytes_sent_total=8_000_000,
    descriptors_total=40,
    transfer_s_total=0.02,
    rooms_done_total=7,
    failures_total={"EXPIRED": 2, "PEER_LOST": 1},
)
BOTH = {
    "num_prefill_bootstrap_queue_reqs": 2, "num_prefill_inflight_queue_reqs": 3, "num_decode_transfer_queue_reqs": 3,
    "kv_transfer_speed_gb_s": 0.4, "kv_transfer_latency_ms": 5.0, "kv_transfer_total_mb": 8.0,
    "num_transfer_failed_reqs_total": 3, "num_bootstrap_failed_reqs_total": 2, "num_local_prefill_reqs_total": 1,
}  # fmt: skip
VLLM = {
    "nixl_bytes_transferred_sum": 8_000_000, "nixl_bytes_transferred_count": 4, "nixl_num_descriptors_sum": 40,
    "nixl_xfer_time_seconds_sum": 0.02, "nixl_num_kv_expired_reqs_total": 2,
}  # fmt: skip


@pytest.mark.parametrize(("family", "expected"), [("vllm", {**BOTH, **VLLM}), ("sglang", BOTH)])
def test_transfers_have_the_names_of_their_family(family, expected):
    metrics = ServerMetrics(family, "m", engine_type="prefill")
    metrics.note_load(msgspec.structs.replace(LOAD, transfer=TRANSFER))
    metrics.note_missed_prefill(True)
    metrics.note_missed_prefill(False)
    found = samples(metrics)
    assert {name: found[f"{family}:{name}"] for name in expected} == pytest.approx(expected)
    text = metrics.render()[0].decode()
    assert 'kv_transfer_failures_total{cause="EXPIRED"' in text
    assert ('engine_type="prefill"' in text) == (family == "sglang")


def test_an_engine_without_peers_has_no_transfers():
    metrics = ServerMetrics("vllm", "m")
    metrics.note_load(LOAD)
    assert not [name for name in samples(metrics) if "transfer_" in name or "nixl" in name]


def test_speed_is_that_of_the_latest_writes():
    metrics = ServerMetrics("vllm", "m")
    for totals in ((1, 1_000_000, 1.0), (2, 3_000_000, 1.001), (2, 3_000_000, 1.001)):
        transfer = TransferLoad(writes_total=totals[0], bytes_sent_total=totals[1], transfer_s_total=totals[2])
        metrics.note_load(msgspec.structs.replace(LOAD, transfer=transfer))
    assert metrics.transfer_speed.gb_per_s == pytest.approx(2.0)
    assert metrics.transfer_speed.latency_ms == pytest.approx(1.0)
