"""The learned threshold: it finds where the two ways cross, follows when that moves, and stays calm."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from diptych.router.learning import FIRST_BUCKET, LocalPrefillLearner, RunningMedian

Times = Callable[[int], float]


def serve(learner: LocalPrefillLearner, count: int, *, local: Times, remote: Times, seed: int = 0) -> list[int]:
    """Send prompts of many lengths as a router would; returns those that were computed locally."""
    source = random.Random(seed)
    chosen = []
    for _ in range(count):
        num_tokens = int(2 ** source.uniform(2, 13))
        is_local = num_tokens < learner.draw_threshold(source.random())
        seconds = (local if is_local else remote)(num_tokens) * source.uniform(0.7, 1.3)
        if source.random() < 0.02:
            seconds += 3.0  # a stall
        learner.observe(num_tokens, is_local=is_local, seconds=seconds)
        if is_local:
            chosen.append(num_tokens)
    return chosen


def test_it_knows_nothing_at_first():
    learner = LocalPrefillLearner()
    assert learner.num_tokens == 0 and learner.draw_threshold(0.5) == 0
    assert learner.draw_threshold(0.0) == 2**FIRST_BUCKET


def test_it_finds_the_crossing_and_follows_it():
    learner = LocalPrefillLearner()
    # Remote costs 10 ms more and computes three times as fast: they cross at 300 tokens.
    serve(learner, 30_000, local=lambda n: n * 50e-6, remote=lambda n: 0.010 + n * 50e-6 / 3)
    assert learner.num_tokens == 256
    # Then the decode engine is kept busy: local loses everywhere.
    serve(learner, 60_000, local=lambda n: 0.1 + n * 50e-6, remote=lambda n: 0.010 + n * 50e-6 / 3, seed=1)
    assert learner.num_tokens == 0


def test_long_prompts_are_never_tried_where_local_loses():
    learner = LocalPrefillLearner()
    chosen = serve(learner, 20_000, local=lambda n: 1.0, remote=lambda n: 0.1)
    assert learner.num_tokens == 0
    assert max(chosen) < 2**FIRST_BUCKET and len(chosen) < 20_000 * 0.05


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.booleans(), st.floats(0, 1e6)), max_size=200),
    st.floats(0, 1, exclude_max=True),
)
def test_whatever_it_sees_the_threshold_is_one_bucket_off_at_most(seen, draw):
    learner = LocalPrefillLearner()
    for num_tokens, is_local, seconds in seen:
        learner.observe(num_tokens, is_local=is_local, seconds=seconds)
    drawn, usual = learner.draw_threshold(draw), learner.num_tokens
    assert drawn in (0, usual // 2, usual, usual * 2 or 2**FIRST_BUCKET)


def test_it_follows_the_median_and_no_stall():
    median, source = RunningMedian(), random.Random(3)
    for _ in range(500):
        median.add(source.uniform(0.5, 1.5))
    for _ in range(3):
        median.add(1000.0)
    assert 0.8 < median.value < 1.2
    for _ in range(500):
        median.add(source.uniform(5.0, 15.0))
    assert 8.0 < median.value < 12.0
