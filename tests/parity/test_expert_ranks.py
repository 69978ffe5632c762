"""Experts over ranks: dealt out whole, in slices and both, against one rank; each rank reads its part of the files.

Ranks are threads here (`thread_ranks.py`).
"""

from __future__ import annotations

import copy

import pytest
import torch
from rank_steps import Story, play, rank_runner, replay
from thread_ranks import ThreadWorld, run_ranks
from tiny_models import CASES, StateDictSource, checkpoint, our_config, prompt, reference_model

from diptych.core.batch import StepOutput
from diptych.core.request import SamplingParams
from diptych.errors import ConfigError
from diptych.kernels.library import kernels
from diptych.models.registry import MODELS
from diptych.models.transformer import Transformer
from diptych.parallel.layer_groups import ONE_RANK, LayerGroups
from diptych.parallel.mesh import MeshSizes

MIXTURES = [name for name in CASES if "moe" in name or name.startswith(("mixtral", "deepseek"))]
SIZES = [MeshSizes(tp=2, ep=2), MeshSizes(tp=4, ep=2), MeshSizes(tp=4, ep=4), MeshSizes(tp=2, ep=2, pp=2)]
GREEDY = SamplingParams(temperature=0.0, logprobs=3)


def name_of(sizes: MeshSizes) -> str:
    return f"tp{sizes.tp}-ep{sizes.ep}-pp{sizes.pp}"


class CountingSource(StateDictSource):
    """Counts the elements of experts that are read."""

    num_read = 0

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = super().read(name, dim=dim, start=start, stop=stop)
        self.num_read += tensor.numel() if ".experts." in name else 0
        return tensor


def model_of(
    case: str, groups: LayerGroups, dtype: torch.dtype = torch.float32, source: StateDictSource | None = None
) -> Transformer:
    reference = reference_model(case)
    config = our_config(reference.config, type(reference).__name__)
    model = MODELS.resolve(config.architecture)(config, groups=groups, dtype=dtype, device="cpu")
    model.load(source or StateDictSource(checkpoint(case)))
    return model


def stories() -> list[Story]:
    return [
        Story(prompt(9, 1), GREEDY, chunks=(3, 4, 2)),
        Story(prompt(6, 2), GREEDY),
        Story(prompt(5, 3), GREEDY, begins=2, chunks=(4, 1)),
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=name_of)
@pytest.mark.parametrize("case", MIXTURES)
def test_ranks_say_what_one_says(case: str, sizes: MeshSizes) -> None:
    told = stories()
    with torch.inference_mode():
        expected = play(rank_runner(model_of(case, ONE_RANK), "reference"), told)
    sources = [CountingSource(checkpoint(case)) for _ in range(sizes.world)]

    def work(world: ThreadWorld) -> list[StepOutput]:
        model = model_of(case, world.groups, source=sources[world.mesh.rank])
        with torch.inference_mode():
            return replay(rank_runner(model, "reference"), copy.deepcopy(told))

    last_stage = run_ranks(sizes, work)[-sizes.tp :]
    for step, known in zip(last_stage[0], expected, strict=True):
        for row, wanted in zip(step.rows, known.rows, strict=True):
            assert row.token_ids == wanted.token_ids
            for entry, other in zip(row.logprobs, wanted.logprobs, strict=True):
                assert entry.logprob == pytest.approx(other.logprob, rel=1e-4, abs=1e-4)
    for other in last_stage[1:]:
        assert [step.rows for step in other] == [step.rows for step in last_stage[0]], "ranks draw the same, to the bit"
    num_elements = sum(tensor.numel() for name, tensor in checkpoint(case).items() if ".experts." in name)
    assert sum(source.num_read for source in sources) == num_elements, "each element is read by one rank"


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
@pytest.mark.parametrize("case", ["qwen2-moe", "deepseek-v3"])
def test_packed_parts_add_up(case: str) -> None:
    """bfloat16 and the CPU kernels: a rank's own rounding is all that differs."""
    token_ids = prompt(40)

    def logits(groups: LayerGroups) -> torch.Tensor:
        model = model_of(case, groups, torch.bfloat16)
        model.pack()
        story = Story(token_ids, SamplingParams(temperature=0.0, prompt_logprobs=0), num_steps=0)
        with torch.inference_mode():
            (output,) = replay(rank_runner(model, "cpu"), [story])
        return torch.tensor([entry.logprob for entry in output.rows[0].prompt_logprobs])

    alone = logits(ONE_RANK)
    for found in run_ranks(MeshSizes(tp=4, ep=2), lambda world: logits(world.groups)):
        assert (found - alone).abs().median() < 0.1


def test_experts_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot share 6 experts"):
        run_ranks(MeshSizes(tp=4, ep=4), lambda world: _six_experts(world.groups))


def test_a_model_without_experts_takes_no_ep_size() -> None:
    with pytest.raises(ConfigError, match="ep_size is 2, but LlamaForCausalLM has no experts"):
        run_ranks(MeshSizes(tp=2, ep=2), lambda world: model_of("llama", world.groups))


def _six_experts(groups: LayerGroups) -> None:
    reference = reference_model("mixtral")
    config = our_config(
        type(reference.config)(**{**reference.config.to_dict(), "num_local_experts": 6}), "MixtralForCausalLM"
    )
    MODELS.resolve(config.architecture)(config, groups=groups, dtype=torch.float32, device="cpu")
