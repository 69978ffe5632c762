"""Every architecture over ranks: tensor parallel, pipeline stages, and both, against one rank and transformers.

Ranks are threads here; `test_rank_processes.py` has a few as processes, with everything that is between them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from rank_steps import Story, assert_alike, model_of, play, play_alone, rank_runner, replay
from thread_ranks import ThreadWorld, run_ranks
from tiny_models import CASES, prompt, reference_model

from diptych.core.batch import StepOutput
from diptych.core.request import SamplingParams
from diptych.errors import ConfigError
from diptych.parallel.layer_groups import ONE_RANK
from diptych.parallel.mesh import MeshSizes

SIZES = [MeshSizes(tp=2), MeshSizes(tp=4), MeshSizes(pp=2), MeshSizes(pp=3), MeshSizes(tp=2, pp=2)]


def name_of(sizes: MeshSizes) -> str:
    return f"tp{sizes.tp}-pp{sizes.pp}"


@pytest.mark.parametrize("case", CASES)
def test_one_rank_says_what_transformers_says(case: str) -> None:
    told, _ = play_alone(case)
    for story in told[:2]:
        text = story.prompt + story.outputs
        logits = reference_model(case)(torch.tensor([text[:-1]])).logits[0, len(story.prompt) - 1 :]
        assert logits.argmax(-1).tolist() == story.outputs


@pytest.mark.parametrize("sizes", SIZES, ids=name_of)
@pytest.mark.parametrize("case", CASES)
def test_ranks_say_what_one_says(case: str, sizes: MeshSizes) -> None:
    told, expected = play_alone(case)

    def work(world: ThreadWorld) -> list[StepOutput]:
        with torch.inference_mode():
            return replay(rank_runner(model_of(case, world.groups), "reference"), copy.deepcopy(told))

    outputs = run_ranks(sizes, work)
    last_stage = outputs[-sizes.tp :]
    assert_alike(last_stage[0], expected)
    for other in last_stage[1:]:
        assert [step.rows for step in other] == [step.rows for step in last_stage[0]], "ranks draw the same, to the bit"


@pytest.mark.parametrize("sizes", [MeshSizes(tp=4), MeshSizes(tp=2, pp=2)], ids=name_of)
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_greedy_steps_need_no_logits(case: str, sizes: MeshSizes) -> None:
    told = [Story(prompt(7, seed), SamplingParams(temperature=0.0), chunks=(4, 3)) for seed in range(3)]
    with torch.inference_mode():
        expected = play(rank_runner(model_of(case, ONE_RANK), "reference"), told)

    def work(world: ThreadWorld) -> list[StepOutput]:
        with torch.inference_mode():
            model = model_of(case, world.groups)
            if world.mesh.is_last_stage:
                model.lm_head.forward = no_logits
            return replay(rank_runner(model, "reference"), told)

    assert_alike(run_ranks(sizes, work)[-1], expected)


def no_logits(hidden: torch.Tensor) -> torch.Tensor:
    raise AssertionError("all logits were gathered")


def test_ranks_that_cannot_share_a_model_are_refused() -> None:
    for sizes, words in (
        (MeshSizes(tp=3), "3 ranks cannot share 4 attention heads"),
        (MeshSizes(tp=8), "8 ranks cannot share 4 attention heads"),
        (MeshSizes(pp=4), "3 layers are too few for 4 stages"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_ranks(sizes, lambda world: model_of("llama", world.groups))
