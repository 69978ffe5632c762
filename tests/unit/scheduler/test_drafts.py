"""Drafts: whatever is guessed, the output is the model's, pages add up, and what does not pay is not drafted."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panel import VOCAB, Panel

from diptych.core.batch import FinishReason, RowOutput, Speculation
from diptych.core.request import Request, SamplingParams
from diptych.core.sequence import Sequence
from diptych.engine.toy import next_token
from diptych.kv.cache import KVCache
from diptych.scheduler.drafts import PRIOR_ACCEPTANCE, DraftPlanner, StepTimes
from diptych.scheduler.step import Counters


def guesser(num_right: int):
    """Guesses of which every so many are right, and then one is not."""

    def guess(token_ids: list[int], most: int) -> list[int]:
        text, drafts = list(token_ids), []
        for place in range(most):
            token_id = next_token(text, VOCAB)
            drafts.append(token_id if place % (num_right + 1) < num_right else (token_id + 1) % VOCAB)
            text.append(drafts[-1])
        return drafts

    return guess


def speculating(num_right: int, **options) -> Panel:
    values = {"max_inflight_steps": 1, "max_drafts": 4, "adapts_drafts": False, "max_num_batched_tokens": 64}
    panel = Panel(**(values | options))
    panel.worker._guess = guesser(num_right)
    return panel


def run(panel: Panel) -> None:
    while panel.plan() is not None or panel.apply():
        pass


def test_right_guesses_take_fewer_steps() -> None:
    panel = speculating(4)
    request = panel.add("a", [1, 2, 3], max_tokens=21, ignore_eos=True)
    run(panel)
    assert panel.tokens["a"] == panel.expected(request)
    assert len(panel.history) == 1 + 4  # the prompt's step yields one token, each later one five
    assert panel.outputs["a"][-1].speculation == Speculation(4, 16, 16)
    counters = panel.scheduler.counters
    assert (counters.verifications_total, counters.drafts_total, counters.accepted_drafts_total) == (4, 16, 16)


@pytest.mark.parametrize("num_right", [0, 1, 2, 4])
def test_stop_token_in_the_middle_of_accepted_drafts(num_right: int) -> None:
    plain = speculating(0, max_drafts=0)
    plain.add("a", [5, 9], max_tokens=30, ignore_eos=True)
    run(plain)
    stop = plain.tokens["a"][7]
    panel = speculating(num_right)
    request = panel.add("a", [5, 9], max_tokens=30, stop_token_ids=(stop,), ignore_eos=True)
    run(panel)
    assert panel.tokens["a"] == panel.expected(request)
    assert panel.reasons["a"] is FinishReason.STOP


def test_no_draft_beyond_the_end() -> None:
    panel = speculating(4)
    panel.add("a", [1, 2], max_tokens=2, ignore_eos=True)
    run(panel)
    assert [step.max_drafts for batch in panel.history for step in batch.steps] == [0, 0]


def test_rejected_tokens_are_never_published() -> None:
    """A prompt that goes on as a wrong draft did finds no page of it in the cache."""
    panel = speculating(1, page_size=1)
    panel.add("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    run(panel)
    text = [1, 2, 3, *panel.tokens["a"]]
    assert panel.cache.match_length([*text, 0], "") == len(text) - 1  # the last token is never computed
    for place in range(4, len(text)):
        wrong = [*text[:place], (text[place] + 1) % VOCAB, 0]
        assert panel.cache.match_length(wrong, "") == place


def test_drafts_retract_nobody() -> None:
    panel = speculating(4, num_pages=10, page_size=4, max_drafts=8)
    panel.add("a", [1] * 11, max_tokens=20, ignore_eos=True)
    panel.add("b", [2] * 11, max_tokens=6, ignore_eos=True)
    panel.plan()
    panel.apply()
    batch = panel.plan()
    assert [step.max_drafts for step in batch.steps] == [8, 0]  # the last two pages are for the next tokens


rows = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 12), st.booleans())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(rows, st.integers(0, 4)), min_size=1, max_size=10),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 5, 16, 64]),
    st.sampled_from([1, 3, 8]),
    st.integers(1, 6),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=3),
)
def test_any_schedule_gives_the_models_output(
    arrivals, page_size, budget, slots, max_drafts, num_right, adapts, aborts
) -> None:
    panel = speculating(
        num_right,
        num_pages=48 // page_size,
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_num_seqs=slots,
        max_drafts=max_drafts,
        adapts_drafts=adapts,
    )
    added: dict[str, Request] = {}
    pending = deque((f"r{i}", *arrival) for i, arrival in enumerate(arrivals))
    turn = 0
    while pending or not panel.scheduler.is_idle:
        if pending and pending[0][2] <= turn % 5:
            name, (prompt, max_tokens, ignore_eos), _ = pending.popleft()
            added[name] = panel.add(name, prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
        panel.plan()
        for when, which in aborts:
            if when == turn:
                panel.scheduler.abort(f"r{which}")
        panel.apply()
        turn += 1
        assert turn < 5000, "stuck"
    panel.listen()
    for name, request in added.items():
        expected = panel.expected(request)
        is_aborted = panel.reasons[name] is FinishReason.ABORT
        assert panel.tokens[name] == (expected[: len(panel.tokens[name])] if is_aborted else expected)
    assert panel.scheduler.flush_cache()
    panel.scheduler.check()


def planner_and_sequence(**options) -> tuple[DraftPlanner, Sequence, KVCache]:
    cache = KVCache(64, 4, prefix_caching=True)
    planner = DraftPlanner(cache, 5, is_adaptive=True, **options)
    request = Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams())
    return planner, Sequence(request, [1, 2], 100, num_computed_tokens=1), cache


def allowed(planner: DraftPlanner, sequence: Sequence, cache: KVCache, *, num_decodes: int = 1) -> int:
    pages = cache.open([1], "", num_tokens=2)
    assert pages is not None
    planner.begin_step(num_decodes)
    count = planner.allow(sequence, pages, 100)
    cache.discard(pages)
    return count


def test_a_sequence_whose_drafts_fail_is_left_alone_and_tried_again() -> None:
    planner, sequence, cache = planner_and_sequence()
    assert allowed(planner, sequence, cache) == 5
    while (count := allowed(planner, sequence, cache)) > 0:
        planner.learn(sequence, RowOutput([3], num_drafts=count), Counters())
    waits = 0
    while allowed(planner, sequence, cache) == 0:
        waits += 1
    assert 3 < waits < 50


def test_a_busy_batch_does_not_draft() -> None:
    """Where a token costs the same in a batch of any size, drafts of middling acceptance only slow it."""
    planner, sequence, cache = planner_and_sequence()
    for num_tokens in (1, 2, 4, 8, 16, 32, 64) * 3:
        planner._times.note(num_tokens, 0.001 + 0.001 * num_tokens)
    assert allowed(planner, sequence, cache, num_decodes=64) == 0
    for num_tokens in (1, 2, 4, 8, 16, 32, 64) * 30:
        planner._times.note(num_tokens, 0.100 + 0.0001 * num_tokens)
    assert allowed(planner, sequence, cache, num_decodes=32) == 5


def test_the_line_of_step_times() -> None:
    times = StepTimes()
    assert times.relative_slope(1) == pytest.approx(StepTimes.PRIOR_SLOPE / (1 + StepTimes.PRIOR_SLOPE))
    for num_tokens in (1, 3, 2, 6, 4, 1, 5):
        times.note(num_tokens, 0.010 + 0.002 * num_tokens)
    assert times.relative_slope(5) == pytest.approx(0.002 / 0.020)
    assert times.relative_slope(1) < PRIOR_ACCEPTANCE
