"""Every architecture against transformers on tiny random models: whole prompts, chunks, decodes and mixtures."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from tiny_models import CASES, Runner, StateDictSource, checkpoint, expected_logits, our_model, prompt, reference_model

from diptych.errors import ConfigError
from diptych.kernels.library import kernels
from diptych.models.registry import MODELS
from diptych.models.transformer import Transformer

LAST_OF_MLP = ("down_proj.weight", "w2.weight")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.5, "logits that are all alike would prove nothing"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


backends = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        pytest.param(
            "cpu", marks=pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
        ),
    ],
)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_whole_prompt(case: str, page_size: int) -> None:
    logits = Runner(our_model(case), page_size).step({0: prompt(70)})[0]
    assert_same(logits, expected_logits(case, 70))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunks", [(1, 30, 3, 36), (16, 16, 16, 16, 6), (69, 1)])
def test_chunks(case: str, chunks: tuple[int, ...]) -> None:
    runner, token_ids = Runner(our_model(case), page_size=4), prompt(70)
    bounds = [0, *itertools.accumulate(chunks)]
    parts = [runner.step({0: token_ids[start:stop]})[0] for start, stop in itertools.pairwise(bounds)]
    assert_same(torch.cat(parts), expected_logits(case, 70))


@backends
@pytest.mark.parametrize("case", CASES)
def test_mixed_batches_of_chunks_and_decodes(case: str, backend: str) -> None:
    """Five sequences of different lengths, each with its own rhythm of chunks, all in the same steps."""
    runner = Runner(our_model(case, backend=backend), page_size=4, backend=backend)
    lengths = {row: 12 + 14 * row for row in range(5)}
    tokens = {row: prompt(length, seed=row) for row, length in lengths.items()}
    rhythms = {row: itertools.cycle(rhythm) for row, rhythm in enumerate([(1,), (5, 1, 1), (17, 1), (1, 2), (40, 1)])}
    collected: dict[int, list[torch.Tensor]] = {row: [] for row in lengths}
    while unfinished := [row for row in lengths if runner.computed.get(row, 0) < lengths[row]]:
        chunks = {}
        for row in unfinished:
            start = runner.computed.get(row, 0)
            chunks[row] = tokens[row][start : start + next(rhythms[row])]
        for row, logits in runner.step(chunks).items():
            collected[row].append(logits)
    for row, parts in collected.items():
        assert_same(torch.cat(parts), expected_logits(case, lengths[row], seed=row))


@pytest.mark.parametrize("case", ["llama-llama3-rope", "gemma3"])
def test_prompt_longer_than_a_query_block(case: str) -> None:
    runner, token_ids = Runner(our_model(case), page_size=16), prompt(400)
    parts = [runner.step({0: token_ids[:90]})[0], runner.step({0: token_ids[90:]})[0]]
    assert_same(torch.cat(parts), expected_logits(case, 400))


@backends
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_as_close_as_transformers_is_to_itself(case: str, backend: str) -> None:
    """Our distance from float32 is at most 1.25 times that of transformers in bfloat16, and the two are close."""
    exact = expected_logits(case, 70)
    # A copy, as bfloat16: the cached model stays float32.
    theirs_model = type(reference_model(case))(reference_model(case).config)
    theirs_model.load_state_dict(reference_model(case).state_dict())
    theirs = theirs_model.eval().bfloat16()(torch.tensor([prompt(70)])).logits[0].float()
    model = our_model(case, torch.bfloat16, backend)
    ours = Runner(model, page_size=16, backend=backend).step({0: prompt(70)})[0]
    has_experts = model.config.experts is not None
    their_error, our_error = rms(theirs - exact, has_experts), rms(ours - exact, has_experts)
    assert our_error <= 1.25 * their_error
    assert rms(ours - theirs, has_experts) <= 1.25 * their_error


def rms(difference: torch.Tensor, has_experts: bool) -> torch.Tensor:
    """Root mean square; the median token's where experts are chosen: rounding may turn a close choice around."""
    squares = difference.square().mean(dim=-1)
    return (squares.median() if has_experts else squares.mean()).sqrt()


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_read_and_a_dry_run_takes_no_memory(case: str) -> None:
    config = our_model(case).config
    state = checkpoint(case)
    source = StateDictSource(state, device="meta")
    model = MODELS.resolve(config.architecture)(config, dtype=torch.bfloat16, device="meta")
    assert isinstance(model, Transformer)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load(source)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert source.names_read == set(state) - tied
    missing = dict(source.tensors)
    lost = next(name for name in missing if name.startswith("model.layers.2.") and name.endswith(LAST_OF_MLP))
    del missing[lost]
    with pytest.raises(ConfigError, match=re.escape(lost)):
        model.load(StateDictSource(missing, device="meta"))


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
@pytest.mark.parametrize("case", ["qwen3-moe-some-layers-dense", "deepseek-v3"])
def test_packed_weights_take_others(case: str) -> None:
    """What packing has copied or reordered is replaced too."""
    generator = torch.Generator().manual_seed(5)
    other = {
        name: tensor + torch.randn(tensor.shape, generator=generator) / 20 for name, tensor in checkpoint(case).items()
    }
    config = our_model(case).config
    fresh, replaced = (
        MODELS.resolve(config.architecture)(config, dtype=torch.bfloat16, device="cpu") for _ in range(2)
    )
    fresh.load(StateDictSource(other), pack_as="none")
    replaced.load(StateDictSource(checkpoint(case)), pack_as="none")
    before = Runner(replaced, 16, "cpu").step({0: prompt(20)})[0]
    replaced.load(StateDictSource(other))
    after, wanted = (Runner(model, 16, "cpu").step({0: prompt(20)})[0] for model in (replaced, fresh))
    assert torch.equal(after, wanted) and not torch.equal(before, wanted)
