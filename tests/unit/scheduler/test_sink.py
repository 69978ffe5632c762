"""Prompts that a peer decodes: they keep their pages, and no slot, until it has them."""

from __future__ import annotations

import pytest
from fake_ports import PeerSink
from panel import Panel, prompt_of

from diptych.core.batch import FinishReason
from diptych.core.request import Request
from diptych.errors import Overloaded
from diptych.scheduler.ports import Dropped, Sent


def sending_panel() -> tuple[Panel, PeerSink, Request]:
    sink = PeerSink()
    panel = Panel(sink=sink)
    request = panel.add("a", prompt_of(40), max_tokens=6, ignore_eos=True)
    for _ in range(6):
        panel.plan()
        panel.apply()
    assert sink.progress == [16, 32, 40]
    assert panel.tokens["a"] == panel.expected(request)[:1] and sink.first_tokens == [panel.tokens["a"]]
    assert panel.cache.num_evictable == 0
    return panel, sink, request


def test_sent_sequences_end_after_the_first_token() -> None:
    panel, sink, _ = sending_panel()
    sink.pending.append(Sent(sink.sampled_sequences[0]))
    panel.run()
    assert panel.reasons["a"] is FinishReason.LENGTH and not sink.cancelled
    assert panel.scheduler.flush_cache() and panel.cache.num_free == 64


def test_a_failed_send_is_answered_with_its_error() -> None:
    panel, sink, _ = sending_panel()
    sink.pending.append(Sent(sink.sampled_sequences[0], Overloaded("the peer is gone")))
    panel.run()
    assert panel.failures["a"].kind == "Overloaded"


def test_aborted_sends_stay_pinned_until_the_sink_lets_go() -> None:
    panel, sink, _ = sending_panel()
    panel.scheduler.abort("a")
    panel.listen()
    assert sink.cancelled == [sink.sampled_sequences[0]] and panel.cache.num_evictable == 0
    sink.pending.append(Sent(sink.sampled_sequences[0]))
    panel.run()
    assert panel.scheduler.flush_cache() and panel.cache.num_free == 64


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_a_dropped_request_ends_wherever_it_is(steps_before: int) -> None:
    sink = PeerSink()
    panel = Panel(sink=sink)
    panel.add("a", prompt_of(40), max_tokens=6)
    for _ in range(steps_before):
        panel.plan()
        panel.apply()
    sink.pending += [Dropped("a"), Dropped("nobody")]
    panel.run()
    assert panel.reasons["a"] is FinishReason.ABORT and panel.scheduler.is_idle


def test_what_is_sent_needs_no_slot() -> None:
    sink = PeerSink()
    panel = Panel(sink=sink, max_num_seqs=1, prefix_caching=False)
    for name in ("a", "b", "c"):
        panel.add(name, prompt_of(20), max_tokens=6, ignore_eos=True)
    for _ in range(8):
        panel.plan()
        panel.apply()
    assert len(sink.first_tokens) == 3, "the first one, which its peer does not take, keeps the others waiting"
    load = panel.scheduler.load()
    assert (load.num_free_slots, load.num_running, load.num_owned_pages) == (1, 3, 15)
    sink.pending += [Sent(sequence) for sequence in sink.sampled_sequences]
    panel.run()
    assert set(panel.reasons.values()) == {FinishReason.LENGTH} and panel.cache.num_owned == 0
