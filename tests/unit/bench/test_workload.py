"""Workloads: the same from the same seed, within their limits, and errors that name what is wrong."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.workload import (
    BenchRequest,
    Case,
    Conversation,
    LengthRange,
    SyntheticSpec,
    Vocabulary,
    dataset_requests,
    synthetic_requests,
    warmup_requests,
)
from diptych.errors import ConfigError


@pytest.mark.parametrize(("text", "expected"), [("7", (7, 7)), ("1:9", (1, 9)), ("12:12", (12, 12))])
def test_length_ranges(text, expected):
    parsed = LengthRange.parse(text, flag="--input-len")
    assert (parsed.low, parsed.high) == expected


@pytest.mark.parametrize("text", ["", "0", "5:4", "1:2:3", "a", "-1", "1:"])
def test_bad_length_ranges_name_the_flag(text):
    with pytest.raises(ConfigError, match="--input-len must be MIN or MIN:MAX"):
        LengthRange.parse(text, flag="--input-len")


@given(
    seed=st.integers(0, 2**32),
    num_prompts=st.integers(1, 20),
    low=st.integers(1, 40),
    spread=st.integers(0, 40),
    prefix=st.integers(0, 20),
)
def test_synthetic_requests_keep_to_their_spec(seed, num_prompts, low, spread, prefix):
    spec = SyntheticSpec(
        num_prompts=num_prompts,
        input_len=LengthRange(low, low + spread),
        output_len=LengthRange(3, 5),
        shared_prefix_len=prefix,
        seed=seed,
    )
    special_ids = {0, 1, 49}
    vocabulary = Vocabulary(50, special_ids)
    requests = synthetic_requests(spec, vocabulary)
    assert requests == synthetic_requests(spec, Vocabulary(50, special_ids))
    assert len(requests) == num_prompts
    for request in requests:
        assert low <= len(request.prompt) - prefix <= low + spread
        assert 3 <= request.max_tokens <= 5
        assert request.prompt[:prefix] == requests[0].prompt[:prefix]
        assert set(request.prompt) <= set(range(50)) - special_ids


def test_seeds_differ():
    vocabulary = Vocabulary(1000, ())
    one, two = (synthetic_requests(SyntheticSpec(seed=seed), vocabulary) for seed in (1, 2))
    assert one[0].prompt != two[0].prompt


def test_a_vocabulary_without_known_special_tokens_uses_its_middle():
    drawn = Vocabulary(100).draw(random.Random(0), 2000)
    assert (min(drawn), max(drawn)) == (25, 74)


def test_a_vocabulary_of_special_tokens_is_refused():
    with pytest.raises(ConfigError, match="a vocabulary of 2 tokens has none"):
        Vocabulary(2, {0, 1})


@pytest.mark.parametrize(
    ("fields", "flag"), [({"num_prompts": 0}, "--num-prompts"), ({"shared_prefix_len": -1}, "--shared-prefix-len")]
)
def test_bad_specs_are_refused(fields, flag):
    with pytest.raises(ConfigError, match=flag):
        synthetic_requests(SyntheticSpec(**fields), Vocabulary(10, ()))


ROWS = """\
{"prompt": "a text", "max_tokens": 3}

{"prompt_token_ids": [5, 6], "id": "ignored"}
{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
"""


def test_a_dataset_may_mix_kinds(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    requests = dataset_requests(path, num_prompts=None, output_len=LengthRange(7, 7), seed=0)
    assert requests == (
        BenchRequest("a text", 3),
        BenchRequest([5, 6], 7),
        BenchRequest(Conversation([{"role": "user", "content": "hello"}]), 9),
    )
    assert dataset_requests(path, num_prompts=2, output_len=LengthRange(7, 7), seed=0) == requests[:2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"line 2: .*"),
        ('{"prompt": 3}', r"line 2: Expected `str \| null`, got `int`"),
        ("{}", "line 2: a row has exactly one of"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 2: a row has exactly one of"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens must be at least 1, got 0"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + row)
    with pytest.raises(ConfigError, match=message):
        dataset_requests(path, num_prompts=None, output_len=LengthRange(1, 1), seed=0)


def test_a_missing_or_empty_dataset_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the dataset"):
        dataset_requests(tmp_path / "none", num_prompts=None, output_len=LengthRange(1, 1), seed=0)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no rows"):
        dataset_requests(tmp_path / "empty", num_prompts=None, output_len=LengthRange(1, 1), seed=0)


def test_warmup_is_as_long_but_shares_no_prefix():
    requests = (
        BenchRequest([1, 2, 3], 50),
        BenchRequest("abc", 4),
        BenchRequest(Conversation([{"role": "user", "content": "hi"}, {"role": "tool", "content": None}]), 4),
        BenchRequest([9], 1),
    )
    assert warmup_requests(requests, 3, max_tokens=16) == (
        BenchRequest([3, 2, 1], 16),
        BenchRequest("cba", 4),
        BenchRequest(Conversation([{"role": "user", "content": "ih"}, {"role": "tool", "content": None}]), 4),
    )


def test_what_a_case_needs():
    case = Case(name="a", rounds=((BenchRequest([4, 8], 10), BenchRequest("text", 99)), (BenchRequest([1] * 5, 2),)))
    assert (case.max_len, case.max_token_id) == (12, 8)
    assert Case(name="b", rounds=((BenchRequest("text", 1),),)).max_token_id == -1
