"""A pipeline stage: what it waits for, what it does not, and the tokens that it is told."""

from __future__ import annotations

import threading
from typing import cast

import pytest
import torch
from rank_steps import Story, batches_of, model_of, play_alone, rank_runner
from thread_ranks import ThreadWorld, run_ranks

from diptych.core.batch import Batch, StepOutput
from diptych.core.request import Grammar, GrammarKind, SamplingParams
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import LayerGroups
from diptych.parallel.mesh import MeshSizes
from diptych.worker.stages import StageLink


class RecordingGroup:
    """A pipeline of three whose sends end when they are waited for."""

    size = 3

    def __init__(self) -> None:
        self.events: list[str] = []

    def send_tensor_dict(self, entries: dict[str, torch.Tensor], **_: object) -> Sent:
        number = int(entries["hidden"][0, 0])
        self.events.append(f"send {number}")
        return Sent(number, self.events)


class Sent:
    def __init__(self, number: int, events: list[str]) -> None:
        self.number, self.events = number, events

    def wait(self) -> None:
        self.events.append(f"wait {self.number}")


def test_as_many_sends_are_under_way_as_there_are_stages() -> None:
    group = RecordingGroup()
    link = StageLink(LayerGroups(pipeline=cast(GroupCoordinator, group)))
    for number in range(5):
        link.send(torch.full((1, 2), number))
    assert group.events == ["send 0", "send 1", "send 2", "wait 0", "send 3", "wait 1", "send 4"]


def test_a_stage_need_not_wait_for_the_next_and_says_nothing() -> None:
    """The second stage begins when the first has computed every step."""
    told, expected = play_alone("llama")
    first_is_done = threading.Event()

    def work(world: ThreadWorld) -> list[StepOutput]:
        with torch.inference_mode():
            runner = rank_runner(model_of("llama", world.groups), "reference")
            if world.mesh.is_last_stage:
                assert first_is_done.wait(30.0)
            outputs = [runner.launch(batch).collect() for batch, _ in batches_of(told)]
            first_is_done.set()
            return outputs

    first, last = run_ranks(MeshSizes(pp=2), work)
    assert all(not row.token_ids and not row.logprobs and row.error is None for step in first for row in step.rows)
    assert tokens_of(last) == tokens_of(expected)


def tokens_of(outputs: list[StepOutput]) -> list[list[int]]:
    return [row.token_ids for step in outputs for row in step.rows]


def test_a_stage_that_is_told_nothing_computes_something_else() -> None:
    """So that the tests above would notice."""
    told, expected = play_alone("llama")

    def silenced(batch: Batch, is_last: bool) -> Batch:
        return batch if is_last else Batch(batch.step_id, batch.releases, batch.admissions, batch.steps)

    def work(world: ThreadWorld) -> list[StepOutput]:
        with torch.inference_mode():
            runner = rank_runner(model_of("llama", world.groups), "reference")
            is_last = world.mesh.is_last_stage
            return [runner.launch(silenced(batch, is_last)).collect() for batch, _ in batches_of(told)]

    _, last = run_ranks(MeshSizes(pp=2), work)
    assert tokens_of(last) != tokens_of(expected)


@pytest.mark.parametrize("sizes", [MeshSizes(tp=2), MeshSizes(pp=2)], ids=["tp", "pp"])
def test_an_admission_that_fails_is_skipped_on_all_ranks(sizes: MeshSizes) -> None:
    bad = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.JSON_SCHEMA, "{"))
    stories = [Story([5, 6, 7], bad, chunks=(2, 1), num_steps=0), Story([8, 9], SamplingParams(temperature=0.0))]

    def work(world: ThreadWorld) -> list[StepOutput]:
        with torch.inference_mode():
            runner = rank_runner(model_of("llama", world.groups), "reference")
            return [runner.launch(batch).collect() for batch, rows in batches_of(stories) if stories[0] in rows]

    *_, last = run_ranks(sizes, work)
    assert [step.rows[0].error is not None for step in last] == [True, True]
    assert last[0].rows[1].token_ids
