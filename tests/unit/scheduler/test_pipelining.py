"""Pipeline stages: what is planned while steps are in flight, and that a first stage is told every token it needs."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panel import Panel

from diptych.core.batch import Batch, FinishReason, StepOutput
from diptych.core.request import Request
from diptych.engine.toy import ToyWorker

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
requests = st.tuples(prompts, st.integers(1, 12), st.booleans())


class FirstStage:
    """Knows what it is told, and samples nothing: the tokens of each row of a batch, by slot."""

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}

    def embed(self, batch: Batch) -> dict[int, list[int]]:
        for slot in batch.releases:
            del self._known[slot]
        for admission in batch.admissions:
            self._known[admission.slot] = list(admission.token_ids)
        for confirmed in batch.tokens:
            self._known[confirmed.slot] += confirmed.token_ids
        rows = {}
        for step in batch.steps:
            rows[step.slot] = self._known[step.slot][step.start : step.start + step.num_tokens]
            assert len(rows[step.slot]) == step.num_tokens, "a token that nobody has told"
        return rows


class LastStage(ToyWorker):
    """Computes what the first stage embedded when the batch was submitted, before any later token was known."""

    def __init__(self, num_pages: int, page_size: int, *, vocab_size: int) -> None:
        super().__init__(num_pages, page_size, vocab_size=vocab_size)
        self.embedded: deque[dict[int, list[int]]] = deque()

    def step(self, batch: Batch) -> StepOutput:
        embedded = self.embedded.popleft()
        output = super().step(batch)
        for step, row in zip(batch.steps, output.rows, strict=True):
            slot = self._slots[step.slot]
            assert embedded[step.slot] == slot.token_ids[step.start : step.start + step.num_tokens]
            assert len(row.token_ids) == step.samples, "a row of a sequence that has ended"
        return output


class Pipe(Panel):
    """A panel whose worker has two stages."""

    def __init__(self, *, num_pages: int = 64, page_size: int = 4, depth: int = 2, **options) -> None:
        super().__init__(
            num_pages=num_pages, page_size=page_size, max_inflight_steps=depth, awaits_tokens=True, **options
        )
        self.worker = LastStage(num_pages, page_size, vocab_size=self.limits.vocab_size)
        self.first = FirstStage()

    def plan(self) -> Batch | None:
        batch = super().plan()
        if batch is not None:
            self.worker.embedded.append(self.first.embed(batch))
        return batch


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(requests, st.integers(0, 4)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.sampled_from([1, 5, 16, 64]),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 11)), max_size=4),
    st.randoms(use_true_random=False),
)
def test_any_schedule_gives_the_models_output(
    arrivals, page_size, depth, budget, slots, caching, aborts, randomness
) -> None:
    pipe = Pipe(
        num_pages=48 // page_size,
        page_size=page_size,
        depth=depth,
        max_num_batched_tokens=budget,
        max_num_seqs=slots,
        prefix_caching=caching,
    )
    added: dict[str, Request] = {}
    pending = deque((f"r{i}", *arrival) for i, arrival in enumerate(arrivals))
    turn = 0
    while pending or not pipe.scheduler.is_idle:
        if pending and pending[0][2] <= turn % 5:
            name, (prompt, max_tokens, ignore_eos), _ = pending.popleft()
            added[name] = pipe.add(name, prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
        for when, which in aborts:
            if when == turn:
                pipe.scheduler.abort(f"r{which}")
        planned = pipe.plan() is not None
        if not planned or len(pipe.batches) >= depth or randomness.random() < 0.3:
            pipe.apply()
        turn += 1
        assert turn < 5000, "stuck"
    pipe.listen()
    for name, request in added.items():
        expected = pipe.expected(request)
        if pipe.reasons[name] is FinishReason.ABORT:
            assert pipe.tokens[name] == expected[: len(pipe.tokens[name])]
        else:
            assert pipe.tokens[name] == expected
    assert pipe.scheduler.flush_cache()
    pipe.scheduler.check()


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_decodes_are_spread_evenly_over_the_steps_in_flight(depth: int) -> None:
    pipe = Pipe(depth=depth, num_pages=256, max_num_seqs=16, max_num_batched_tokens=64)
    for index in range(10):
        pipe.add(f"r{index}", [1, 2, index], max_tokens=60, ignore_eos=True)
    for _ in range(40):
        while pipe.plan() is not None:
            pass
        pipe.apply()
    assert len(pipe.batches) == depth - 1
    sizes = [len(batch.steps) for batch in pipe.history[-2 * depth :]]
    assert sum(sizes) == 2 * 10
    assert max(sizes) == -(-10 // depth)


def test_everybody_gets_their_turn() -> None:
    pipe = Pipe(depth=2, num_pages=256, max_num_seqs=16, max_num_batched_tokens=64)
    for index in range(7):
        pipe.add(f"r{index}", [1, 2, index], max_tokens=60, ignore_eos=True)
    for _ in range(30):
        pipe.plan()
        pipe.apply()  # at once: who has just decoded may decode again
    counts = [len(tokens) for tokens in pipe.tokens.values()]
    assert max(counts) - min(counts) <= 1


def test_chunks_of_a_prompt_follow_one_another() -> None:
    pipe = Pipe(depth=3, max_num_batched_tokens=8)
    pipe.add("long", list(range(24)), max_tokens=4, ignore_eos=True)
    batches = [pipe.plan() for _ in range(3)]
    assert [[(step.start, step.num_tokens) for step in batch.steps] for batch in batches] == [
        [(0, 8)],
        [(8, 8)],
        [(16, 8)],
    ]
    assert pipe.plan() is None
    pipe.apply()
    assert pipe.plan() is None, "its first token is not known yet"
    pipe.apply()
    pipe.apply()
    batch = pipe.plan()
    assert [(step.start, step.samples) for step in batch.steps] == [(24, True)]
    assert [(told.slot, told.token_ids) for told in batch.tokens] == [(batch.steps[0].slot, pipe.tokens["long"])]


def test_one_stage_is_told_nothing_that_it_knows() -> None:
    panel = Panel()
    panel.add("r", [1, 2, 3], max_tokens=8, ignore_eos=True)
    panel.run()
    assert not any(batch.tokens for batch in panel.history)
