"""The scheduler over the toy worker, whose output depends on every byte of every page."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.batch import FinishReason, RowOutput
from diptych.core.messages import RequestFailed, RequestOutput
from diptych.core.request import Request, SamplingParams
from diptych.core.sequence import Sequence
from diptych.engine.toy import ToyWorker, expected_output
from diptych.errors import DeadlineExceeded, Overloaded, PromptTooLong, RequestError
from diptych.kv.cache import KVCache, SequencePages
from diptych.scheduler.ports import Begin, Dropped, FirstToken, GaveUp, Landed, Sent, SinkNews, SourceNews
from diptych.scheduler.scheduler import Scheduler
from diptych.scheduler.step import SchedulerLimits

VOCAB = 50
EOS = (7,)


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Panel:
    """Scheduler and toy worker, stepped by hand; keeps what clients were told."""

    def __init__(
        self, *, num_pages: int = 64, page_size: int = 4, prefix_caching: bool = True, source=None, sink=None, **limits
    ) -> None:
        values = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
            "max_inflight_steps": 2,
            "max_queued_requests": 100,
            "max_model_len": num_pages * page_size,
            "vocab_size": VOCAB,
            "eos_token_ids": EOS,
        }
        self.limits = SchedulerLimits(**(values | limits))
        self.cache = KVCache(num_pages, page_size, prefix_caching=prefix_caching)
        self.clock = Clock()
        self.scheduler = Scheduler(self.limits, self.cache, source=source, sink=sink, clock=self.clock)
        self.worker = ToyWorker(num_pages, page_size, vocab_size=VOCAB)
        self.batches = deque()
        self.history = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(
        self, request_id: str, prompt: list[int], *, priority: int = 0, deadline=None, key="", **sampling
    ) -> Request:
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, **sampling),
            priority=priority,
            deadline=deadline,
            cache_key=key,
        )
        self.scheduler.add(request)
        self.tokens[request_id] = []
        return request

    def plan(self):
        batch = self.scheduler.plan()
        if batch is not None:
            assert batch.num_tokens <= self.limits.max_num_batched_tokens
            self.batches.append(batch)
            self.history.append(batch)
        self.listen()
        return batch

    def apply(self) -> bool:
        if not self.batches:
            return False
        self.scheduler.apply(self.worker.step(self.batches.popleft()))
        self.scheduler.check()
        self.listen()
        return True

    def listen(self) -> None:
        for answer in self.scheduler.take_answers():
            assert answer.request_id not in self.reasons, "answered after its end"
            assert answer.request_id not in self.failures, "answered after its end"
            if isinstance(answer, RequestFailed):
                self.failures[answer.request_id] = answer
                continue
            self.tokens[answer.request_id] += answer.token_ids
            self.outputs.setdefault(answer.request_id, []).append(answer)
            if answer.finish_reason is not None:
                self.reasons[answer.request_id] = answer.finish_reason

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            planned = self.plan() is not None
            full = len(self.batches) >= self.limits.max_inflight_steps
            if (full or not planned) and not self.apply() and not planned:
                assert self.scheduler.is_idle, "stuck"
                return
        raise AssertionError("did not come to rest")

    def expected(self, request: Request) -> list[int]:
        return expected_output(
            request, vocab_size=VOCAB, max_len=self.limits.max_model_len, eos_token_ids=self.limits.eos_token_ids
        )


def prompt_of(length: int, start: int = 11) -> list[int]:
    return [(start + 3 * i) % VOCAB for i in range(length)]


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


class PeerPrefill:
    """A PrefillSource that fills pages in the worker's memory when told to."""

    def __init__(self) -> None:
        self.begun: list[tuple[Sequence, SequencePages]] = []
        self.cancelled: list[Sequence] = []
        self.pending: list[SourceNews] = []
        self.kept: list[int] = []
        self.freed: list[int] = []
        self.answer = Begin.ELSEWHERE

    def begin(self, sequence: Sequence, pages: SequencePages) -> Begin:
        if sequence.num_output_tokens or sequence in [begun for begun, _ in self.begun]:
            return Begin.HERE
        if self.answer is Begin.ELSEWHERE:
            self.begun.append((sequence, pages))
        return self.answer

    def news(self) -> list[SourceNews]:
        news, self.pending = self.pending, []
        return news

    def keep(self, sequence: Sequence, pages: list[int]) -> None:
        self.kept += pages

    def freed_pages(self) -> list[int]:
        freed, self.freed = self.freed, []
        return freed

    def cancel(self, sequence: Sequence) -> None:
        self.cancelled.append(sequence)


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


class PeerSink:
    """A PageSink that decodes everything elsewhere."""

    def __init__(self) -> None:
        self.progress: list[int] = []
        self.first_tokens: list[list[int]] = []
        self.pending: list[SinkNews] = []
        self.cancelled: list[Sequence] = []

    def wants(self, sequence: Sequence) -> bool:
        return True

    def computed(self, sequence: Sequence, pages: SequencePages) -> None:
        self.progress.append(sequence.num_confirmed_tokens)

    def sampled(self, sequence: Sequence, row: RowOutput) -> None:
        self.sequence = sequence
        self.first_tokens.append(row.token_ids)

    def is_reading(self, sequence: Sequence) -> bool:
        return False

    def news(self) -> list[SinkNews]:
        news, self.pending = self.pending, []
        return news

    def cancel(self, sequence: Sequence) -> None:
        self.cancelled.append(sequence)


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
    sink.pending.append(Sent(sink.sequence))
    panel.run()
    assert panel.reasons["a"] is FinishReason.LENGTH and not sink.cancelled
    assert panel.scheduler.flush_cache() and panel.cache.num_free == 64


def test_a_failed_send_is_answered_with_its_error() -> None:
    panel, sink, _ = sending_panel()
    sink.pending.append(Sent(sink.sequence, Overloaded("the peer is gone")))
    panel.run()
    assert panel.failures["a"].kind == "Overloaded"


def test_aborted_sends_stay_pinned_until_the_sink_lets_go() -> None:
    panel, sink, _ = sending_panel()
    panel.scheduler.abort("a")
    panel.listen()
    assert sink.cancelled == [sink.sequence] and panel.cache.num_evictable == 0
    sink.pending.append(Sent(sink.sequence))
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
