"""Measuring a toy engine: what is asked for is what runs, each round cold, and refusals are records."""

from __future__ import annotations

import pytest

from diptych.bench.measure import CaseResult
from diptych.bench.offline import (
    OfflineOptions,
    check_cases,
    measure_case,
    measure_cases,
    measure_round,
    peak_rss_nbytes,
    vocabulary_of,
)
from diptych.bench.workload import BenchRequest, Case, Conversation, LengthRange, SyntheticSpec, synthetic_requests
from diptych.errors import ConfigError

OPTIONS = OfflineOptions(num_warmup=2)


def synthetic(service, **fields):
    spec = SyntheticSpec(
        **{"num_prompts": 6, "input_len": LengthRange(8, 40), "output_len": LengthRange(3, 9), **fields}
    )
    return synthetic_requests(spec, vocabulary_of(service))


def test_random_prompts_avoid_special_tokens(service):
    assert len(vocabulary_of(service)) == 256


async def test_a_case_generates_what_was_asked(service):
    requests = synthetic(service)
    case = Case(name="toy", rounds=(requests, requests))
    (result,) = await measure_cases(service, [case], OPTIONS)
    assert isinstance(result, CaseResult)
    assert not result.failures
    for measured in result.rounds:
        assert [record.num_output_tokens for record in measured.records] == [item.max_tokens for item in requests]
        assert measured.num_prompt_tokens == sum(len(item.prompt) for item in requests)
        assert measured.engine.generation_tokens == measured.num_output_tokens
        assert measured.engine.steps > 0
        assert all(record.queue_s is not None for record in measured.records)
        assert all(record.started_s <= record.arrivals[0].at_s <= record.ended_s for record in measured.records)


async def test_rounds_begin_with_an_empty_prefix_cache(service):
    requests = synthetic(service, num_prompts=1, input_len=LengthRange(32, 32))
    result = await measure_case(service, Case(name="toy", rounds=(requests,) * 3), OfflineOptions(num_warmup=1))
    assert [measured.cached_tokens for measured in result.rounds] == [0, 0, 0]


async def test_a_shared_prefix_is_shared_within_a_round(service):
    requests = synthetic(service, num_prompts=20, shared_prefix_len=64)
    measured = await measure_round(service, requests, OPTIONS)
    assert measured.cached_tokens >= 64
    assert measured.engine.cached_tokens == measured.cached_tokens


async def test_texts_and_conversations_become_tokens(service):
    conversation = Conversation([{"role": "user", "content": "hello"}])
    measured = await measure_round(service, [BenchRequest("some text", 2), BenchRequest(conversation, 2)], OPTIONS)
    assert measured.records[0].num_prompt_tokens == len("some text")
    assert measured.records[1].num_prompt_tokens > len("hello")
    assert not measured.failures


async def test_a_refused_request_is_a_record(service):
    requests = [BenchRequest([1] * 300, 4), BenchRequest([1, 2, 3], 4)]
    measured = await measure_round(service, requests, OPTIONS)
    assert measured.failures == {"context_length_exceeded": 1}
    assert [record.num_output_tokens for record in measured.records] == [0, 4]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (BenchRequest([1] * 250, 10), "big needs a context of 260 tokens, the engine has 256"),
        (BenchRequest([400], 1), "big has token 400, the model's vocabulary 258 tokens"),
    ],
)
def test_cases_that_cannot_run_are_refused_before_any_runs(service, request_, message):
    with pytest.raises(ConfigError, match=message):
        check_cases([Case(name="big", rounds=((request_,),))], service.info)


def test_peak_memory_is_plausible():
    assert 2**24 < peak_rss_nbytes() < 2**40
