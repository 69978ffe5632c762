"""What a router reads from a body, and what it splices in."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import RequestError
from diptych.router.prompt import read_prompt

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["messages", "prompt", "text", "input_ids", "input", "tools", "model", "bootstrap_room", "cache_salt"]


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), values, max_size=6), st.booleans())
def test_any_object_is_understood_and_a_pair_fits_in(body, is_indented):
    text = orjson.dumps(body, option=orjson.OPT_INDENT_2 if is_indented else 0) + b" \n"
    prompt = read_prompt(text)
    kept = {key: value for key, value in body.items() if key != "bootstrap_room"}
    assert orjson.loads(prompt.body) == kept
    told = orjson.loads(prompt.with_bootstrap('h"', 5))
    assert told == {**kept, "bootstrap_host": 'h"', "bootstrap_port": 5}


@given(st.binary(max_size=20))
def test_bytes_never_break_it(text):
    try:
        read_prompt(text)
    except RequestError:
        return
    assert isinstance(orjson.loads(text), dict)


@pytest.mark.parametrize(
    ("body", "num_tokens"),
    [
        ({"input_ids": [1] * 7}, 7),
        ({"input_ids": [[1] * 7, [2] * 3]}, 10),
        ({"prompt": "x" * 9}, 3),
        ({"prompt": ["x" * 4, "y" * 4]}, 2),
        ({"text": "x" * 8, "model": 5}, 2),
        ({"messages": [{"role": "user", "content": "x" * 34}]}, 10),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 34}, {"type": "image_url"}]}]}, 10),
        ({"messages": [], "prompt": None}, 0),
        ({}, 0),
    ],
)
def test_tokens_are_estimated(body, num_tokens):
    assert read_prompt(orjson.dumps(body)).num_tokens == num_tokens


def test_a_conversation_begins_like_the_one_before():
    turn = [{"role": "user", "content": "tell me " * 100}]
    first = read_prompt(orjson.dumps({"messages": turn})).blocks
    more = [*turn, {"role": "assistant", "content": "once " * 200}, {"role": "user", "content": "go on"}]
    assert read_prompt(orjson.dumps({"messages": more})).blocks[: len(first)] == first != []


def test_untouched_bodies_keep_their_bytes():
    text = b'{ "text":"a",  "n": 1.0 }'
    assert read_prompt(text).body is text
