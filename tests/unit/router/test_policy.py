"""Policies as functions: whom they choose, and laws that hold for all of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.router.policy import (
    MIN_MATCHED,
    POLICIES,
    Candidate,
    Choice,
    Draw,
    choose,
    least_loaded,
    prefix_aware,
    random_choice,
    round_robin,
)

draws = st.builds(Draw, turn=st.integers(0, 1000), noise=st.floats(0, 1, exclude_max=True))


@st.composite
def pools(draw, min_size=1):
    urls = draw(st.lists(st.integers(0, 99), min_size=min_size, max_size=6, unique=True))
    shares = st.sampled_from([0.0, 0.1, MIN_MATCHED, 0.5, 1.0])
    return [Candidate(f"e{url}", draw(st.integers(0, 20)), draw(st.integers(0, 9)), draw(shares)) for url in urls]


@pytest.mark.parametrize("policy", POLICIES.values())
@given(pool=pools(), draw=draws)
def test_every_policy_chooses_a_candidate_and_the_same_one_again(policy, pool, draw):
    assert policy(pool, draw) in pool
    assert policy(pool, draw) == policy(list(pool), draw)


@given(pool=pools())
def test_round_robin_is_fair(pool):
    counts = Counter(round_robin(pool, Draw(turn)).url for turn in range(3 * len(pool)))
    assert set(counts.values()) == {3}


def test_random_covers_everyone_evenly():
    pool = [Candidate("a"), Candidate("b"), Candidate("c")]
    counts = Counter(random_choice(pool, Draw(noise=step / 300)).url for step in range(300))
    assert set(counts.values()) == {100}


@given(pool=pools(), draw=draws)
def test_least_loaded_is_never_beaten(pool, draw):
    chosen = least_loaded(pool, draw)
    assert not [one for one in pool if (one.load, one.pending_tokens) < (chosen.load, chosen.pending_tokens)]


def test_least_loaded_spreads_ties():
    pool = [Candidate("a"), Candidate("b", load=1), Candidate("c")]
    assert {least_loaded(pool, Draw(turn)).url for turn in range(4)} == {"a", "c"}


@pytest.mark.parametrize(
    ("loads", "matched", "chosen"),
    [
        ((3, 0), (0.9, 0.0), "a"),  # warm and not much busier
        ((5, 0), (0.9, 0.0), "b"),  # warm, but too far ahead
        ((50, 40), (0.9, 0.0), "a"),  # both are busy: the ratio counts
        ((3, 0), (0.2, 0.0), "b"),  # what all prompts share is no warmth
        ((3, 0), (0.9, 0.9), "b"),  # both warm
        ((3, 0), (0.9, 0.8), "a"),
    ],
)
def test_prefix_aware_weighs_warmth_against_load(loads, matched, chosen):
    pool = [Candidate(name, load, 0, share) for name, load, share in zip("ab", loads, matched, strict=True)]
    assert prefix_aware(pool, Draw()).url == chosen


@given(
    unified=pools(0),
    decode=pools(0),
    prefill=pools(0),
    draw=draws,
    num_tokens=st.integers(0, 200),
    threshold=st.integers(0, 200),
    name=st.sampled_from(sorted(POLICIES)),
)
def test_a_choice_is_a_complete_way(unified, decode, prefill, draw, num_tokens, threshold, name):
    decode = [Candidate("d" + one.url, one.load, one.pending_tokens, one.matched) for one in decode]
    prefill = [Candidate("p" + one.url, one.load, one.pending_tokens, one.matched) for one in prefill]
    choice = choose(
        POLICIES[name],
        draw,
        unified=unified,
        decode=decode,
        prefill=prefill,
        num_tokens=num_tokens,
        local_prefill_tokens=threshold,
    )
    if not unified and not decode:
        assert choice is None
        return
    assert choice is not None
    target = next(one for one in [*unified, *decode] if one.url == choice.target)
    is_remote = target in decode and bool(prefill) and num_tokens * (1 - target.matched) >= threshold
    assert (choice.prefill in {one.url for one in prefill}) == is_remote
    assert is_remote or choice.prefill is None


def test_a_prefill_engine_alone_takes_nothing():
    choice = choose(
        round_robin,
        Draw(),
        unified=[],
        decode=[],
        prefill=[Candidate("p")],
        num_tokens=5,
        local_prefill_tokens=0,
    )
    assert choice is None


def test_without_prefill_engines_decode_does_both():
    choice = choose(
        round_robin, Draw(), unified=[], decode=[Candidate("d")], prefill=[], num_tokens=5, local_prefill_tokens=0
    )
    assert choice == Choice("d", None, 5)
