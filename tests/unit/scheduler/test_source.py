"""Prompts that a peer computes: when they are told, when their pages pass on, and what cancels and losses do."""

from __future__ import annotations

import pytest
from fake_ports import PeerPrefill
from panel import EOS, VOCAB, Panel, prompt_of

from diptych.core.batch import FinishReason, RowOutput
from diptych.core.request import Request
from diptych.engine.toy import expected_output
from diptych.errors import Overloaded
from diptych.scheduler.ports import Begin, FirstToken, GaveUp, Landed


def sample_first(source: PeerPrefill, num_cached_tokens: int = 0) -> None:
    sequence, _ = source.begun[0]
    first = expected_output(sequence.request, vocab_size=VOCAB, max_len=256, eos_token_ids=EOS)[0]
    source.pending.append(FirstToken(sequence, RowOutput([first]), num_cached_tokens))


def land(panel: Panel, source: PeerPrefill) -> None:
    sequence, pages = source.begun[0]
    panel.worker.store(pages.pages, 0, sequence.request.prompt_token_ids)
    source.pending.append(Landed(sequence))


def loading_panel(**sampling: object) -> tuple[Panel, PeerPrefill, Request]:
    source = PeerPrefill()
    panel = Panel(source=source)
    request = panel.add("a", prompt_of(10), **{"max_tokens": 6, "ignore_eos": True, **sampling})
    assert panel.plan() is None and panel.cache.num_owned == 3
    return panel, source, request


def test_first_token_is_told_before_the_pages_land() -> None:
    panel, source, request = loading_panel()
    sample_first(source, num_cached_tokens=4)
    assert panel.plan() is None
    assert panel.tokens["a"] == panel.expected(request)[:1] and panel.outputs["a"][0].cached_tokens == 4
    land(panel, source)
    panel.run()
    assert panel.tokens["a"] == panel.expected(request)
    assert panel.worker.num_computed_tokens == 5


def test_landed_prompts_serve_the_prefix_cache() -> None:
    panel, source, _ = loading_panel()
    sample_first(source)
    land(panel, source)
    panel.run()
    source.answer = Begin.HERE
    second = panel.add("b", prompt_of(10), max_tokens=3, ignore_eos=True)
    panel.run()
    assert panel.tokens["b"] == panel.expected(second) and panel.outputs["b"][0].cached_tokens == 8


def test_an_output_of_one_token_takes_no_step() -> None:
    panel, source, _ = loading_panel(max_tokens=1)
    sample_first(source)
    panel.plan()
    assert panel.reasons["a"] is FinishReason.LENGTH and source.cancelled
    land(panel, source)
    panel.run()
    assert panel.history == [] and panel.scheduler.flush_cache()


def test_a_source_without_room_keeps_the_queue_in_order() -> None:
    source = PeerPrefill()
    source.answer = Begin.LATER
    panel = Panel(source=source)
    request = panel.add("a", prompt_of(10), max_tokens=3)
    assert panel.plan() is None and panel.cache.num_owned == 0
    source.answer = Begin.HERE
    panel.run()
    assert panel.tokens["a"] == panel.expected(request)


def test_cancelled_loading_keeps_its_pages_until_the_transfer_settles() -> None:
    panel, source, _ = loading_panel()
    panel.scheduler.abort("a")
    panel.listen()
    assert panel.reasons["a"] is FinishReason.ABORT and len(source.cancelled) == 1
    assert panel.cache.num_owned == 3
    source.pending.append(GaveUp(source.begun[0][0]))
    panel.run()
    assert panel.cache.num_owned == 0


def test_failed_loading_is_answered() -> None:
    panel, source, _ = loading_panel()
    source.pending.append(GaveUp(source.begun[0][0], Overloaded("the peer is full")))
    panel.run()
    assert panel.failures["a"].kind == "Overloaded" and panel.cache.num_owned == 0


@pytest.mark.parametrize("has_first_token", [False, True])
def test_a_lost_transfer_is_computed_here_and_its_pages_stay_in_quarantine(has_first_token: bool) -> None:
    panel, source, request = loading_panel()
    if has_first_token:
        sample_first(source)
        panel.plan()
    source.pending.append(GaveUp(source.begun[0][0], keeps_pages=True))
    for _ in range(4):
        panel.plan()
        panel.apply()
    assert len(source.kept) == 3
    running_pages = panel.history[0].steps[0].new_pages
    assert not set(running_pages) & set(source.kept)
    panel.run()
    assert panel.tokens["a"] == panel.expected(request)
    source.freed, source.kept = source.kept, []
    panel.run()
    assert panel.scheduler.flush_cache() and panel.cache.num_free == 64


def test_a_cancelled_request_waits_nowhere_while_its_pages_are_in_quarantine() -> None:
    panel, source, _ = loading_panel()
    panel.scheduler.abort("a")
    source.pending.append(GaveUp(source.begun[0][0], keeps_pages=True))
    panel.run()
    load = panel.scheduler.load()
    assert (load.num_waiting, load.num_quarantined_pages, load.num_owned_pages) == (0, 3, 3)
    assert panel.scheduler.is_idle
    source.freed, source.kept = source.kept, []
    panel.run()
    assert panel.scheduler.load().num_owned_pages == 0


def test_the_running_and_the_landed_do_not_wait_for_each_other() -> None:
    """A pool that is full of one sequence that grows and others that have landed and are to grow."""
    source = PeerPrefill()
    panel = Panel(num_pages=10, page_size=4, source=source)
    requests = [panel.add(f"r{start}", prompt_of(12, start), max_tokens=9, ignore_eos=True) for start in (5, 6)]
    panel.plan()
    source.answer = Begin.HERE
    requests.append(panel.add("running", prompt_of(15), max_tokens=20, ignore_eos=True))
    panel.plan()
    assert len(source.begun) == 2 and panel.cache.num_free == 0
    for sequence, pages in source.begun:
        panel.worker.store(pages.pages, 0, sequence.request.prompt_token_ids)
        row = RowOutput(panel.expected(sequence.request)[:1])
        source.pending += [FirstToken(sequence, row), Landed(sequence)]
    panel.run()
    for request in requests:
        assert panel.tokens[request.request_id] == panel.expected(request)
    assert panel.scheduler.counters.retractions_total


def test_who_waits_for_pages_that_a_peer_is_to_fill_is_counted() -> None:
    source = PeerPrefill()
    panel = Panel(num_pages=4, page_size=4, source=source)
    for name in ("a", "b", "c"):
        panel.add(name, prompt_of(12, ord(name)), max_tokens=2)
    assert panel.scheduler.num_awaiting_pages == 3
    panel.plan()
    assert panel.scheduler.num_awaiting_pages == 2
