"""Schedulers of data-parallel groups as one: whatever is asked, every group takes every step, and all are answered."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panel import EOS, VOCAB

from diptych.core.batch import Batch, FinishReason, StepOutput
from diptych.core.messages import RequestFailed
from diptych.core.request import Request, SamplingParams
from diptych.engine.toy import ToyWorker, expected_output
from diptych.errors import Overloaded, RequestError, Unsupported
from diptych.kv.cache import KVCache
from diptych.scheduler.groups import GroupedScheduler
from diptych.scheduler.scheduler import Scheduler
from diptych.scheduler.step import SchedulerLimits

MAX_LEN = 48


class Groups:
    """A grouped scheduler with a toy worker a group, stepped by hand."""

    def __init__(self, count: int, *, num_pages: int = 12, **limits: object) -> None:
        values = {
            "max_num_seqs": 3,
            "max_num_batched_tokens": 16,
            "max_inflight_steps": 1,
            "max_queued_requests": 100,
            "max_model_len": MAX_LEN,
            "vocab_size": VOCAB,
            "eos_token_ids": EOS,
        }
        self.limits = SchedulerLimits(**(values | limits))
        self.scheduler = GroupedScheduler(
            [Scheduler(self.limits, KVCache(num_pages, 4, prefix_caching=True)) for _ in range(count)]
        )
        self.workers = [ToyWorker(num_pages, 4, vocab_size=VOCAB) for _ in range(count)]
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason | None] = {}
        self.num_shares = [0] * count

    def add(self, request_id: str, prompt: list[int], **sampling: object) -> Request:
        request = Request(request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
        self.scheduler.add(request)
        self.tokens[request_id] = []
        return request

    def step(self) -> bool:
        batch = self.scheduler.plan()
        if batch is not None:
            assert self.scheduler.plan() is None, "one step at a time"
            self.scheduler.apply(self._run(batch))
            self.scheduler.check()
        for answer in self.scheduler.take_answers():
            assert answer.request_id not in self.ends, "answered after its end"
            if isinstance(answer, RequestFailed):
                self.ends[answer.request_id] = None
                continue
            self.tokens[answer.request_id] += answer.token_ids
            if answer.finish_reason is not None:
                self.ends[answer.request_id] = answer.finish_reason
        return batch is not None

    def _run(self, batch: Batch) -> StepOutput:
        assert len(batch.groups) == len(self.workers)
        for index, group in enumerate(batch.groups):
            assert group.group_tokens[index] == max(1, group.num_tokens)
            assert group.group_rows[index] == (sum(step.samples for step in group.steps) if group.steps else 1)
            assert (group.group_tokens, group.group_rows) == (batch.groups[0].group_tokens, batch.groups[0].group_rows)
            self.num_shares[index] += bool(group.steps)
        parts = [worker.step(group) for worker, group in zip(self.workers, batch.groups, strict=True)]
        return StepOutput(batch.step_id, [], 0.0, groups=parts)

    def expected(self, request: Request) -> list[int]:
        return expected_output(request, vocab_size=VOCAB, max_len=MAX_LEN, eos_token_ids=EOS)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=14),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 13)), max_size=4),
)
def test_any_schedule_gives_the_models_output(arrivals, count: int, aborts) -> None:
    groups = Groups(count)
    requests: dict[str, Request] = {}
    pending = list(enumerate(arrivals))
    for turn in range(2000):
        while pending and pending[0][1][2] <= turn % 4:
            index, (prompt, max_tokens, _) = pending.pop(0)
            requests[f"r{index}"] = groups.add(f"r{index}", prompt, max_tokens=max_tokens)
        for when, which in aborts:
            if when == turn:
                groups.scheduler.abort(f"r{which}")
        if not groups.step() and not pending and groups.scheduler.is_idle:
            break
    assert groups.ends.keys() == requests.keys()
    for name, request in requests.items():
        whole = groups.expected(request)
        got = groups.tokens[name]
        assert got == (whole[: len(got)] if groups.ends[name] is FinishReason.ABORT else whole)
    assert groups.scheduler.open_requests() == []
    assert groups.scheduler.flush_cache()


def test_requests_go_where_there_are_fewest() -> None:
    groups = Groups(2)
    for index in range(4):
        groups.add(f"r{index}", [1, 2, index], max_tokens=5, ignore_eos=True)
    while groups.step():
        pass
    assert groups.num_shares == [5, 5]
    load = groups.scheduler.load()
    assert (load.num_pages, load.num_slots, load.steps_total, load.generation_tokens_total) == (24, 6, 5, 20)
    assert groups.scheduler.counters.generation_tokens_total == 20


def test_an_idle_group_takes_an_empty_step() -> None:
    groups = Groups(3)
    groups.add("only", [1, 2, 3], max_tokens=4, ignore_eos=True)
    batch = groups.scheduler.plan()
    assert [len(group.steps) for group in batch.groups] == [1, 0, 0]
    assert batch.groups[2].group_tokens == [3, 1, 1]


def test_refusals_change_nothing() -> None:
    groups = Groups(2, max_queued_requests=1)
    groups.add("a", [1])
    groups.add("b", [1])
    with pytest.raises(RequestError, match="'a' is already in use"):
        groups.add("a", [1])
    with pytest.raises(Overloaded):
        groups.add("c", [1])
    with pytest.raises(Unsupported, match="dp_size above 1"):
        groups.add("d", [1], prompt_logprobs=1)
    assert sorted(groups.scheduler.open_requests()) == ["a", "b"]
