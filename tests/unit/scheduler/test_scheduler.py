"""What a step computes: outputs whatever the depth, chunks, cache hits and retractions."""

from __future__ import annotations

import pytest
from panel import EOS, Panel, prompt_of

from diptych.core.batch import FinishReason


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40])
def test_output_is_the_models_whatever_the_depth_and_chunks(depth: int, length: int) -> None:
    panel = Panel(max_inflight_steps=depth)
    request = panel.add("a", prompt_of(length), max_tokens=12)
    panel.run()
    assert panel.tokens["a"] == panel.expected(request)
    assert panel.scheduler.is_idle and panel.cache.num_owned == 0


def test_one_token_takes_no_decode_step() -> None:
    panel = Panel()
    panel.add("a", prompt_of(5), max_tokens=1, ignore_eos=True)
    panel.run()
    assert len(panel.history) == 1
    assert panel.reasons["a"] is FinishReason.LENGTH and len(panel.tokens["a"]) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_token_is_computed_after_eos(depth: int) -> None:
    panel = Panel(max_inflight_steps=depth, prefix_caching=False)
    request = panel.add("a", prompt_of(6), max_tokens=200)
    panel.run()
    expected = panel.expected(request)
    assert expected[-1] in EOS and len(expected) < 200
    assert panel.reasons["a"] is FinishReason.STOP
    assert panel.worker.num_computed_tokens == 6 + len(expected) - 1


def test_second_request_takes_the_prefix_from_the_cache() -> None:
    panel = Panel()
    first = panel.add("a", prompt_of(20), max_tokens=3, ignore_eos=True)
    panel.run()
    computed = panel.worker.num_computed_tokens
    second = panel.add("b", [*prompt_of(20), 1, 2], max_tokens=3, ignore_eos=True)
    panel.run()
    assert panel.tokens["a"] == panel.expected(first) and panel.tokens["b"] == panel.expected(second)
    assert panel.outputs["b"][0].cached_tokens == 20
    assert panel.worker.num_computed_tokens - computed == 2 + 2


def test_another_cache_key_shares_nothing() -> None:
    panel = Panel()
    panel.add("a", prompt_of(20), max_tokens=2)
    panel.run()
    panel.add("b", prompt_of(20), max_tokens=2, key="tenant")
    panel.run()
    assert panel.outputs["b"][0].cached_tokens == 0


def test_twins_in_one_batch_share_the_prompt() -> None:
    panel = Panel(max_num_batched_tokens=64)
    requests = [panel.add(f"r{i}", prompt_of(20), max_tokens=4) for i in range(4)]
    panel.run()
    assert [panel.tokens[r.request_id] for r in requests] == [panel.expected(requests[0])] * 4
    assert sum(panel.outputs[r.request_id][0].cached_tokens for r in requests) == 3 * 16


@pytest.mark.parametrize("depth", [1, 2])
def test_retracted_requests_continue_with_the_same_output(depth: int) -> None:
    panel = Panel(num_pages=10, page_size=4, max_inflight_steps=depth, prefix_caching=False)
    requests = [panel.add(f"r{i}", prompt_of(6, i), max_tokens=20, ignore_eos=True) for i in range(4)]
    panel.run()
    assert panel.scheduler.counters.retractions_total > 0
    for request in requests:
        assert panel.tokens[request.request_id] == panel.expected(request)


def test_decodes_come_before_chunks() -> None:
    panel = Panel(max_num_batched_tokens=8, prefix_caching=False)
    panel.add("a", prompt_of(4), max_tokens=30, ignore_eos=True)
    panel.plan()
    panel.apply()
    panel.add("b", prompt_of(40), max_tokens=2)
    panel.run()
    assert all(batch.steps[0].num_tokens == 1 for batch in panel.history[1:6])
    assert [batch.steps[1].num_tokens for batch in panel.history[1:6]] == [7] * 5
