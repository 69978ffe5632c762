"""Any schedule of requests, aborts and page shortage: output right, books balanced, everyone answered."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from panel import Panel

from diptych.core.batch import FinishReason
from diptych.core.request import Request

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
requests = st.tuples(prompts, st.integers(1, 12), st.integers(0, 3), st.booleans())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(requests, st.integers(0, 4)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.sampled_from([1, 5, 16, 64]),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 11)), max_size=4),
)
def test_any_schedule_gives_the_models_output(arrivals, page_size, depth, budget, slots, caching, aborts) -> None:
    """Random prompts sharing prefixes, few pages, aborts at any moment: output right, books balanced, all answered."""
    panel = Panel(
        num_pages=48 // page_size,
        page_size=page_size,
        max_inflight_steps=depth,
        max_num_batched_tokens=budget,
        max_num_seqs=slots,
        prefix_caching=caching,
        policy="priority",
    )
    added: dict[str, Request] = {}
    pending = deque((f"r{i}", *arrival) for i, arrival in enumerate(arrivals))
    turn = 0
    while pending or not panel.scheduler.is_idle:
        if pending and pending[0][2] <= turn % 5:
            name, (prompt, max_tokens, priority, ignore_eos), _ = pending.popleft()
            added[name] = panel.add(name, prompt, max_tokens=max_tokens, priority=priority, ignore_eos=ignore_eos)
        for when, which in aborts:
            if when == turn:
                panel.scheduler.abort(f"r{which}")
        planned = panel.plan() is not None
        if not planned or len(panel.batches) >= depth:
            panel.apply()
        turn += 1
        assert turn < 5000, "stuck"
    panel.listen()
    for name, request in added.items():
        expected = panel.expected(request)
        if panel.reasons[name] is FinishReason.ABORT:
            assert panel.tokens[name] == expected[: len(panel.tokens[name])]
        else:
            assert panel.tokens[name] == expected
    assert panel.scheduler.flush_cache()
    panel.scheduler.check()
