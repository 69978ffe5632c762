"""Adapters against peft and transformers: tiny models of every dense architecture, and the demo model."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_folders import save_adapter
from make_golden import load_reference
from thread_ranks import run_ranks
from tiny_models import Runner, StateDictSource, checkpoint, our_config, our_model, prompt, reference_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel

from diptych.core.request import SamplingParams
from diptych.errors import AdapterError, UnknownModel
from diptych.kernels.library import kernels
from diptych.layers.lora import StepAdapters
from diptych.models.adapter_files import read_adapter
from diptych.models.adapters import ModelAdapters
from diptych.models.registry import MODELS
from diptych.offline import LLM
from diptych.parallel.layer_groups import ONE_RANK, LayerGroups
from diptych.parallel.mesh import MeshSizes

CASES = ["llama-head-dim-biases-tied", "mistral-window", "qwen2", "qwen3", "gemma3"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8},
    "rslora": {"rank": 5, "use_rslora": True, "lora_alpha": 9},
    "patterns": {
        "rank": 4,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 17, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def make_adapters(model: PreTrainedModel, folder: Path) -> dict[str, PreTrainedModel]:
    """Every adapter of ADAPTERS in a folder of its name, and peft's model with it."""
    return {
        name: save_adapter(copy.deepcopy(model), folder / name, seed=seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


class AdaptedRunner:
    """Steps of one of our models whose rows are under adapters in slots."""

    def __init__(self, case: str, folder: Path, *, backend: str, dtype: torch.dtype) -> None:
        model = our_model.__wrapped__(case, dtype, backend)
        self._adapters = ModelAdapters(model, num_slots=len(ADAPTERS))
        self._runner = Runner(model, page_size=4, backend=backend)
        for slot, name in enumerate(ADAPTERS):
            found = read_adapter(folder / name, max_rank=32)
            self._adapters.put(slot, self._adapters.prepare(found.modules, name))

    def run(self, tokens: dict[int, list[int]], slot_of: dict[int, int]) -> dict[int, torch.Tensor]:
        """Logits of whole sequences, computed in chunks of different rhythm that share steps."""
        rhythms = {row: itertools.cycle(rhythm) for row, rhythm in enumerate([(1,), (5, 1, 1), (17, 1), (1, 2)])}
        parts: dict[int, list[torch.Tensor]] = {row: [] for row in tokens}
        computed = dict.fromkeys(tokens, 0)
        while left := [row for row in tokens if computed[row] < len(tokens[row])]:
            chunks = {row: tokens[row][computed[row] : computed[row] + next(rhythms[row])] for row in left}
            ends = itertools.accumulate(len(chunk) for chunk in chunks.values())
            segments = [
                (end - len(chunk), len(chunk), slot_of[row])
                for end, (row, chunk) in zip(ends, chunks.items(), strict=True)
            ]
            self._adapters.begin_step(StepAdapters(segments))
            with torch.inference_mode():
                for row, logits in self._runner.step(chunks).items():
                    parts[row].append(logits)
            computed |= {row: computed[row] + len(chunk) for row, chunk in chunks.items()}
        return {row: torch.cat(found) for row, found in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_mixed_steps_of_a_tiny_model(case: str, tmp_path: Path) -> None:
    """The base model and three adapters in the same steps, each as peft has it alone."""
    adapted = make_adapters(reference_model(case), tmp_path)
    runner = AdaptedRunner(case, tmp_path, backend="reference", dtype=torch.float32)
    tokens = {row: prompt(9 + 8 * row, seed=row) for row in range(4)}
    ours = runner.run(tokens, {0: -1, 1: 0, 2: 1, 3: 2})
    theirs = [reference_model(case), *adapted.values()]
    for row, model in enumerate(theirs):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([tokens[row]])).logits[0]
            base = reference_model(case)(torch.tensor([tokens[row]])).logits[0]
        assert row == 0 or (expected - base).abs().max() > 0.1, "an adapter that does nothing would prove nothing"
        torch.testing.assert_close(ours[row], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe-some-layers-dense"])
def test_attention_of_a_mixture(case: str, tmp_path: Path) -> None:
    """Experts have no adapters, attention has; an adapter for more is refused."""
    kept = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    adapted = save_adapter(copy.deepcopy(reference_model(case)), tmp_path / "attention", **kept)
    model = our_model.__wrapped__(case)
    adapters, runner = ModelAdapters(model, num_slots=1), Runner(model, page_size=4)
    modules = read_adapter(tmp_path / "attention", max_rank=32).modules
    some = next(iter(modules.values()))
    adapters.put(0, adapters.prepare(modules, "attention"))
    adapters.begin_step(StepAdapters([(0, 30, 0)]))
    with torch.inference_mode():
        ours = runner.step({0: prompt(30)})[0]
        expected = adapted(input_ids=torch.tensor([prompt(30)])).logits[0]
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)
    with pytest.raises(AdapterError, match="experts"):
        adapters.prepare({"model.layers.0.mlp.experts.0.up_proj": some}, "more")


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_bfloat16_kernels_are_close(case: str, tmp_path: Path) -> None:
    """Packed weights: our distance from float32 is about that of the model without adapters."""
    adapted = make_adapters(reference_model(case), tmp_path)
    runner = AdaptedRunner(case, tmp_path, backend="cpu", dtype=torch.bfloat16)
    tokens = {row: prompt(40, seed=row) for row in range(4)}
    ours = runner.run(tokens, {0: -1, 1: 0, 2: 1, 3: 2})
    errors = []
    for row, model in enumerate([reference_model(case), *adapted.values()]):
        with torch.inference_mode():
            exact = model(input_ids=torch.tensor([tokens[row]])).logits[0]
        errors.append(((ours[row] - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item())
    assert max(errors[1:]) < 2.5 * errors[0]


@torch.inference_mode()
def greedy(model: PreTrainedModel, token_ids: list[int]) -> list[int]:
    """What transformers goes on with."""
    ids = torch.tensor([token_ids])
    # Without a mask, tokens that happen to be the padding would not be attended.
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    found: list[int] = output[0, len(token_ids) :].tolist()
    return found


def save_tiny(case: str, folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = reference_model(case)
    model.save_pretrained(folder)
    vocabulary = {f"t{token_id} ": token_id for token_id in range(model.config.vocab_size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0 ")).save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_whatever_else_is_in_the_batch(case: str, tmp_path: Path) -> None:
    """More adapters than slots, few pages, chunks, prefix hits: each greedy output is peft's own."""
    adapted = make_adapters(save_tiny(case, tmp_path), tmp_path)
    theirs = {"": reference_model(case), **adapted}
    prompts = [prompt(length, seed=length) for length in (3, 23, 50)]
    names = [name for name in theirs for _ in prompts]
    expected = [greedy(theirs[name], ids) for name, ids in zip(names, prompts * 4, strict=True)]
    pool = f"{40 * reference_model(case).config.num_hidden_layers * 2 * 4 * 2 * 16 * 4 // 1024}KiB"
    options = {"dtype": "float32", "page_size": 4, "kv_cache_memory": pool, "max_num_batched_tokens": 16}
    with LLM(str(tmp_path), **options, num_threads=1, check_invariants=True, max_loras=2) as llm:
        for name in ADAPTERS:
            llm.load_lora_adapter(name, str(tmp_path / name))
        for _ in range(2):  # the second time from the cache
            done = llm.generate(prompts * 4, GREEDY, adapters=names)
            assert [each.token_ids for each in done] == expected
        seeded = SamplingParams(temperature=1.0, max_tokens=24, seed=7)
        alone = [llm.generate([ids], seeded, adapters=name)[0] for name, ids in zip(names, prompts * 4, strict=True)]
        together = llm.generate(prompts * 4, seeded, adapters=names)
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]
        llm.unload_lora_adapter("all")
        with pytest.raises(UnknownModel, match="'all' is not loaded; loaded are: 'rslora', 'patterns'"):
            llm.generate(prompts, GREEDY, adapters="all")


@pytest.mark.parametrize("case", ["llama-head-dim-biases-tied", "qwen2", "qwen3-moe-some-layers-dense"])
def test_tensor_parallel_ranks_take_slices(case: str, tmp_path: Path) -> None:
    """Two ranks, each with its part of an adapter, compute what one does."""
    targets = "all-linear" if "moe" not in case else ["q_proj", "k_proj", "v_proj", "o_proj"]
    save_adapter(copy.deepcopy(reference_model(case)), tmp_path / "all", rank=6, target_modules=targets)
    token_ids = prompt(30)

    def logits(groups: LayerGroups) -> torch.Tensor:
        config = our_config(reference_model(case).config, type(reference_model(case)).__name__)
        model = MODELS.resolve(config.architecture)(config, dtype=torch.float32, device="cpu", groups=groups)
        model.load(StateDictSource(checkpoint(case)))
        adapters = ModelAdapters(model, num_slots=1)
        adapters.put(0, adapters.prepare(read_adapter(tmp_path / "all", max_rank=8).modules, "all"))
        adapters.begin_step(StepAdapters([(0, len(token_ids), 0)]))
        with torch.inference_mode():
            return Runner(model, page_size=4).step({0: token_ids})[0]

    alone = logits(ONE_RANK)
    for found in run_ranks(MeshSizes(tp=2), lambda world: logits(world.groups)):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # what transformers warns of while it reads a GGUF file is not ours
def test_trained_on_the_demo_model(tmp_path: Path) -> None:
    """An adapter that has learned some tokens by heart says them as it does in transformers, and the base does not."""
    learned = [2, *range(1000, 1014)]
    reference = load_reference(torch.float32)
    adapted = save_adapter(reference, tmp_path / "learned", rank=8, std=0.02, train_on=[learned], num_steps=4)
    asked = learned[:6]
    with torch.inference_mode():
        ids = torch.tensor([asked])
        expected = adapted.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
    with LLM("demo", dtype="float32", kv_cache_memory="64MiB", lora_paths=(f"learned={tmp_path / 'learned'}",)) as llm:
        base, ours = llm.generate([asked] * 2, SamplingParams(temperature=0.0, max_tokens=8), adapters=["", "learned"])
    assert ours.token_ids == expected[0, len(asked) :].tolist()
    assert ours.token_ids != base.token_ids
