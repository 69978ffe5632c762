"""Speculation changes nothing but the time: with it every output is what it is without, token by token.

Sampled outputs too, for a token is drawn from the model's distribution with the noise of its seed and position,
whatever was guessed. On a tiny random model, whose greedy output soon goes in circles, so that guesses are often right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lora_folders import save_adapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from diptych import LLM, SamplingParams
from diptych.core.request import Grammar, GrammarKind
from diptych.errors import ConfigError
from diptych.offline import Completion

VOCAB = 258
OPTIONS = {"dtype": "float32", "page_size": 4, "kv_cache_memory": "1MiB", "num_threads": 1, "check_invariants": True}
PROMPTS = [
    "abcabcabcabcab",
    "x",
    "the cat sat on the mat, the cat sat on the",
    "a b a b a b a b a b a b a b a b a b",
    "0123456789" * 9,
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokens are bytes."""
    return save_tiny(tmp_path_factory.mktemp("speculative") / "tiny", num_hidden_layers=2)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, whose keys and values have another shape; it guesses nothing right but by chance."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 24}
    return save_tiny(tmp_path_factory.mktemp("speculative") / "smaller", **shape)


def save_tiny(folder: Path, **shape: int) -> Path:
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    torch.manual_seed(0)
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "eos_token_id": 256,
        "bos_token_id": 257,
    }
    config = LlamaConfig(**{**values, **shape})
    LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module", params=["NGRAM", "STANDALONE"])
def eager(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Guesses as much as it may: from the text, or with the model itself as its own draft model."""
    options = {} if request.param == "NGRAM" else drafting_with(folder)
    with speculating(folder, **options) as llm:
        yield llm


def drafting_with(folder: Path) -> dict[str, object]:
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}


def speculating(folder: Path, **options: object) -> LLM:
    flags = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, "speculative_adaptive": False}
    return LLM(str(folder), **{**OPTIONS, **flags, **options})


def num_accepted(completions: list[Completion]) -> int:
    return sum(done.speculation.num_accepted for done in completions if done.speculation is not None)


def assert_same(plain: LLM, eager: LLM, prompts: list[str], sampling: SamplingParams) -> list[Completion]:
    expected, found = plain.generate(prompts, sampling), eager.generate(prompts, sampling)
    for one, other in zip(expected, found, strict=True):
        assert (other.token_ids, other.text) == (one.token_ids, one.text)
        assert (other.finish_reason, other.matched_stop) == (one.finish_reason, one.matched_stop)
        for there, here in zip(one.logprobs, other.logprobs, strict=True):
            assert here.token_id == there.token_id and here.rank == there.rank
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
            assert [token_id for token_id, _ in here.top] == [token_id for token_id, _ in there.top]
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
    return found


def test_greedy_is_that_of_transformers_in_fewer_steps(folder, eager) -> None:
    reference = LlamaForCausalLM.from_pretrained(folder)
    before = eager.load().steps_total
    completions = eager.generate(PROMPTS, GREEDY)
    for done in completions:
        with torch.inference_mode():
            token_ids = torch.tensor([done.prompt_token_ids])
            found = reference.generate(token_ids, do_sample=False, max_new_tokens=60, eos_token_id=None)
        assert done.token_ids == found[0, token_ids.shape[1] :].tolist()
    assert num_accepted(completions) > 100
    assert eager.load().steps_total - before < 50


def test_a_model_guesses_itself_right(folder) -> None:
    with speculating(folder, **drafting_with(folder), max_num_batched_tokens=24) as llm:
        for done in llm.generate(PROMPTS, GREEDY):
            # The first token is the prompt's; then five a step, and what is left.
            assert done.speculation is not None and done.speculation.num_verifications <= 13
            assert done.speculation.num_accepted >= done.speculation.num_drafts - 1


def test_wrong_guesses_change_nothing(folder, smaller, plain) -> None:
    with speculating(folder, **drafting_with(smaller)) as llm:
        found = assert_same(plain, llm, PROMPTS, GREEDY)
    assert sum(done.speculation.num_drafts for done in found) > 4 * num_accepted(found)


def test_a_draft_model_of_another_vocabulary_is_refused(folder, tmp_path) -> None:
    other = save_tiny(tmp_path / "other", num_hidden_layers=1, vocab_size=300)
    with pytest.raises(ConfigError, match="300 tokens, the model 258"):
        speculating(folder, **drafting_with(other))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 0.2, "seed": 5},
        {"temperature": 0.3, "seed": 11, "top_k": 5, "logprobs": 2},
        {"temperature": 0.1, "seed": 3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.05},
        {"temperature": 0.0, "frequency_penalty": 0.02, "presence_penalty": 0.01, "logprobs": 0},
        {"temperature": 0.1, "seed": 2, "repetition_penalty": 1.02},
        {"temperature": 0.0, "logit_bias": {97: 1.0, 98: -1.0}},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_every_way_to_sample(plain, eager, sampling) -> None:
    found = assert_same(plain, eager, PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True, **sampling))
    assert num_accepted(found) > 0


def test_ends_in_the_middle_of_accepted_guesses(plain, eager) -> None:
    """Stop tokens, stop strings, EOS and lengths at every place of an output whose guesses are right."""
    (whole,) = plain.generate(PROMPTS[:1], GREEDY)
    for place in range(20, 30):
        token_id = whole.token_ids[place]
        for sampling in (
            SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=(token_id,), min_tokens=place),
            SamplingParams(temperature=0.0, max_tokens=place, ignore_eos=True),
            SamplingParams(temperature=0.0, max_tokens=60, stop=(whole.text[place : place + 3],), ignore_eos=True),
        ):
            assert_same(plain, eager, PROMPTS[:1], sampling)


def test_grammar(plain, eager, request) -> None:
    schema = '{"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 6, "maxItems": 6}'
    grammars = [Grammar(GrammarKind.JSON_SCHEMA, schema), Grammar(GrammarKind.REGEX, "(abc){8}d?"), None]
    samplings = [SamplingParams(temperature=0.0, max_tokens=80, grammar=grammar) for grammar in grammars]
    expected, found = [llm.generate(["say: "] * 3, samplings) for llm in (plain, eager)]
    assert [done.text for done in found] == [done.text for done in expected]
    assert found[1].text.startswith("abcabcabcabcabcabcabcabc")
    if request.node.callspec.params["eager"] == "NGRAM":  # a draft model knows nothing of grammars
        assert num_accepted(found[1:2]) > 5


def test_pages_of_what_was_said_are_right(plain, eager) -> None:
    """An answer's pages serve the next turn: what was guessed wrongly is in none of them."""
    first = eager.generate(PROMPTS, GREEDY)
    prompts = [[*done.prompt_token_ids, *done.token_ids, 65] for done in first]
    expected, found = [llm.generate(prompts, GREEDY) for llm in (plain, eager)]
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert all(done.cached_tokens >= len(prompt) - 6 for done, prompt in zip(found, prompts, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"page_size": 1, "prefix_caching": False},
        {"kv_cache_memory": "48KiB"},
        {"speculative_adaptive": True, "speculative_num_draft_tokens": 9},
        {"max_num_seqs": 2},
    ],
    ids=["chunk-7", "page-1-uncached", "retraction", "adaptive", "two-slots"],
)
@pytest.mark.parametrize("drafter", ["NGRAM", "STANDALONE"])
def test_whatever_the_configuration(folder, plain, options, drafter) -> None:
    prompts = [*PROMPTS, "yxyxyx", "abcd" * 4]
    if drafter == "STANDALONE":
        options = options | drafting_with(folder)
        if "kv_cache_memory" in options:  # a page holds the draft's keys and values, too
            options = options | {"kv_cache_memory": "96KiB"}
    with speculating(folder, **options) as llm:
        assert_same(plain, llm, prompts, GREEDY)
        load = llm.load()
        assert load.accepted_drafts_total > 0
        assert load.num_free_pages + load.num_cached_pages == load.num_pages
        assert load.retractions_total > 0 or "kv_cache_memory" not in options


def test_ranks_of_a_tensor_group_guess_alike(folder, plain) -> None:
    with speculating(folder, tp_size=2) as llm:
        found = assert_same(plain, llm, PROMPTS, GREEDY)
        sampled = SamplingParams(temperature=0.2, seed=5, max_tokens=40, ignore_eos=True)
        assert_same(plain, llm, PROMPTS, sampled)
    assert num_accepted(found) > 100


def test_adapters(folder, tmp_path) -> None:
    """Each row is verified by the model with its own adapter; the draft model has none."""
    path = tmp_path / "adapter"
    save_adapter(LlamaForCausalLM.from_pretrained(folder), path, rank=4, std=0.05)
    names = ["a", "", "a", "", "a"]
    outputs = []
    for options in ({"speculative_algorithm": "none"}, {}, drafting_with(folder)):
        with speculating(folder, **options, lora_paths=(f"a={path}",)) as llm:
            outputs.append(llm.generate(PROMPTS, GREEDY, adapters=names))
    for found in outputs[1:]:
        assert [done.token_ids for done in found] == [done.token_ids for done in outputs[0]]
        assert num_accepted(found) > 0
