"""Who gets in, in which order, and how requests end before their time."""

from __future__ import annotations

import pytest
from panel import VOCAB, Panel, prompt_of

from diptych.core.batch import FinishReason
from diptych.errors import DeadlineExceeded, Overloaded, PromptTooLong, RequestError


def test_priority_goes_first() -> None:
    panel = Panel(max_num_seqs=1, policy="priority")
    panel.add("low", prompt_of(4), max_tokens=2, ignore_eos=True)
    panel.add("high", prompt_of(4), max_tokens=2, ignore_eos=True, priority=5)
    panel.run()
    assert list(panel.reasons) == ["high", "low"]


def test_fcfs_ignores_priority() -> None:
    panel = Panel(max_num_seqs=1)
    panel.add("first", prompt_of(4), max_tokens=2, ignore_eos=True)
    panel.add("second", prompt_of(4), max_tokens=2, ignore_eos=True, priority=5)
    panel.run()
    assert list(panel.reasons) == ["first", "second"]


def test_deadline_ends_waiting_and_running_requests() -> None:
    panel = Panel(max_num_seqs=1)
    panel.add("running", prompt_of(4), max_tokens=200, ignore_eos=True, deadline=1010.0)
    panel.add("waiting", prompt_of(4), max_tokens=200, deadline=1005.0)
    panel.plan()
    panel.clock.now = 1011.0
    panel.run()
    assert {i: f.kind for i, f in panel.failures.items()} == dict.fromkeys(["running", "waiting"], "DeadlineExceeded")
    assert DeadlineExceeded.__name__ == "DeadlineExceeded"


def test_config_timeout_is_a_deadline() -> None:
    panel = Panel(request_timeout=3.0)
    panel.add("a", prompt_of(4), max_tokens=100, ignore_eos=True)
    panel.plan()
    panel.clock.now += 4.0
    panel.run()
    assert panel.failures["a"].kind == "DeadlineExceeded"


def test_queue_is_bounded() -> None:
    panel = Panel(max_queued_requests=2)
    panel.add("a", prompt_of(4), max_tokens=2)
    panel.add("b", prompt_of(4), max_tokens=2)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        panel.add("c", prompt_of(4), max_tokens=2)
    panel.run()
    assert set(panel.reasons) == {"a", "b"}


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], RequestError), ([VOCAB], RequestError), ([-1], RequestError), ([1] * 256, PromptTooLong)],
)
def test_bad_prompts_are_refused(prompt: list[int], error: type[Exception]) -> None:
    panel = Panel()
    with pytest.raises(error):
        panel.add("a", prompt, max_tokens=2)
    assert panel.scheduler.is_idle


def test_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    panel = Panel()
    request = panel.add("a", prompt_of(4), max_tokens=3)
    with pytest.raises(RequestError, match="already in use"):
        panel.scheduler.add(request)
    panel.run()
    assert panel.tokens["a"] == panel.expected(request)


def test_longest_sequence_that_fits_the_pool_runs_alone() -> None:
    panel = Panel(num_pages=8, page_size=4)
    request = panel.add("a", prompt_of(31), ignore_eos=True)
    panel.run()
    assert panel.tokens["a"] == panel.expected(request) and len(panel.tokens["a"]) == 1


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_abort_gives_everything_back(steps_before: int) -> None:
    panel = Panel()
    panel.add("a", prompt_of(40), max_tokens=50, ignore_eos=True)
    for _ in range(steps_before):
        panel.plan()
        if len(panel.batches) == 2:
            panel.apply()
    panel.scheduler.abort("a")
    panel.run()
    assert panel.reasons["a"] is FinishReason.ABORT
    assert panel.scheduler.flush_cache() and panel.cache.num_free == 64


def test_id_of_an_aborted_request_may_be_used_again_at_once() -> None:
    panel = Panel()
    panel.add("a", prompt_of(4), max_tokens=50, ignore_eos=True)
    panel.plan()
    panel.scheduler.abort("a")
    panel.listen()
    panel.reasons.clear()
    request = panel.add("a", prompt_of(9), max_tokens=5)
    panel.run()
    assert panel.tokens["a"] == panel.expected(request)


def test_flush_is_refused_while_a_request_is_open() -> None:
    panel = Panel()
    panel.add("a", prompt_of(9), max_tokens=5)
    assert not panel.scheduler.flush_cache()
    panel.run()
    assert panel.scheduler.flush_cache() and panel.cache.num_cached == 0
