"""The picture of prefix caches: what it finds, what it forgets, how large it gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.router.prefixes import BLOCK_CHARS, BLOCK_TOKENS, MAX_BLOCKS, PrefixIndex, block_keys

prompts = st.lists(st.integers(0, 3), max_size=8)


def keys_of(prompt: list[int]) -> list[int]:
    return block_keys([[number] * BLOCK_TOKENS for number in prompt])


def num_common(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


@given(st.lists(st.tuples(prompts, st.sampled_from("abc")), max_size=12), prompts)
def test_it_finds_the_longest_beginning_that_an_engine_was_sent(history, prompt):
    index = PrefixIndex()
    for sent, engine in history:
        index.record(keys_of(sent), engine)
    longest = {
        engine: max(num_common(prompt, sent) for sent, to in history if to == engine)
        for engine in {to for _, to in history}
    }
    assert index.matches(keys_of(prompt)) == {engine: count for engine, count in longest.items() if count}


@given(st.lists(st.tuples(prompts, st.sampled_from("abc")), max_size=12), prompts)
def test_a_forgotten_engine_is_never_found(history, prompt):
    index, without = PrefixIndex(), PrefixIndex()
    for sent, engine in history:
        index.record(keys_of(sent), engine)
        if engine != "a":
            without.record(keys_of(sent), engine)
    index.forget("a")
    assert index.matches(keys_of(prompt)) == without.matches(keys_of(prompt))
    assert len(index) == len(without)


@given(st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=20))
def test_it_is_bounded_and_remembers_the_latest(history):
    index = PrefixIndex(max_entries=10)
    for prompt in history:
        index.record(keys_of(prompt), "a")
        assert len(index) <= 10
        assert index.matches(keys_of(prompt)).get("a", 0) == len(prompt)


def test_first_blocks_outlive_later_ones():
    index = PrefixIndex(max_entries=3)
    keys = keys_of([0, 1, 2, 3, 4])
    index.record(keys, "a")
    assert index.matches(keys) == {"a": 3}


def test_texts_run_on_over_messages_and_salts_part_them():
    text = "word " * BLOCK_CHARS
    assert block_keys([text]) == block_keys([text[:100], text[100:]])
    assert not set(block_keys([text], "x")) & set(block_keys([text]))
    assert block_keys([text[: BLOCK_CHARS - 1]]) == []


def test_one_prompt_is_bounded():
    assert len(block_keys(["x" * BLOCK_CHARS * (MAX_BLOCKS + 5)])) == MAX_BLOCKS
