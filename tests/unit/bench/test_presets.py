"""Presets are frozen: figures published with them must stay comparable."""

from __future__ import annotations

import hashlib
import json

import pytest

from diptych.bench.presets import choose_cases, cpu_cases, h200_cases
from diptych.bench.workload import Headline, Vocabulary
from diptych.errors import ConfigError


@pytest.fixture(scope="module")
def h200():
    return list(h200_cases())


def digest(case) -> str:
    (requests,) = case.rounds
    content = [[request.prompt for request in requests], [request.max_tokens for request in requests]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def test_h200_token_ids_are_the_published_ones(h200):
    assert {case.name: digest(case) for case in h200} == {
        "batch1_decode": "b83baae3a4985e70",
        "prefill_8k": "e8e8eb629ed9995b",
        "tput_1024_256": "9536c4ebbba31ea9",
        "decode_bs256": "85672cdc9df1d837",
        "mixed_1000": "ce54cae5a7d11001",
        "shared_prefix": "8525912f8fb66157",
    }


def test_cases_are_chosen_by_name_in_their_own_order(h200):
    chosen = choose_cases(iter(h200), "decode_bs256, batch1_decode")
    assert [case.name for case in chosen] == ["batch1_decode", "decode_bs256"]
    assert choose_cases(iter(h200), None) == h200
    with pytest.raises(ConfigError, match="--cases names 'prefill'; this preset has batch1_decode, prefill_8k"):
        choose_cases(iter(h200), "prefill")


def test_cpu_cases_are_the_columns_of_the_table():
    cases = {case.name: case for case in cpu_cases(Vocabulary(2000, ()), 0)}
    shapes = {
        name: {(len(request.prompt), request.max_tokens) for request in case.requests} for name, case in cases.items()
    }
    assert shapes["single_stream"] == {(128, 128)}
    assert shapes["prefill_1024"] == {(1024, 1)}
    assert shapes["decode_32"] == {(224, 64)}
    assert all(128 <= prompt <= 512 and 64 <= output <= 128 for prompt, output in shapes["offline_32"])
    assert {name: len(case.rounds[0]) for name, case in cases.items()} == {
        "single_stream": 1,
        "prefill_1024": 1,
        "offline_32": 32,
        "decode_32": 32,
    }
    assert cases["prefill_1024"].headline is Headline.INPUT_RATE


def test_no_two_cpu_prompts_begin_alike():
    prompts = [request.prompt for case in cpu_cases(Vocabulary(2000, ()), 0) for request in case.requests]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)
