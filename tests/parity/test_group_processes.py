"""Data-parallel attention: groups of rank processes answer what one rank answers, however unevenly they are busy."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_steps import tokenizer_json
from tiny_models import prompt, reference_model

from diptych import LLM, SamplingParams
from diptych.core.request import Grammar, GrammarKind
from diptych.errors import Unsupported

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=4, ignore_eos=True)
DIGITS = SamplingParams(temperature=0.0, max_tokens=6, grammar=Grammar(GrammarKind.REGEX, "[0-9]{9}"))
# Prompts of several chunks and of one token, in any case more than there are slots in a group.
PROMPTS = [prompt(40, 1), prompt(3, 2), prompt(1, 3), prompt(21, 4), prompt(9, 5), prompt(33, 6)]
SAMPLING = [GREEDY, SEEDED, GREEDY, DIGITS, SEEDED, GREEDY]


def answers(folder: Path, **parallel: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and their logprobs, of all prompts together and then of one alone, while other groups are idle."""
    with LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        page_size=4,
        kv_cache_memory="1MiB",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        check_invariants=True,
        num_threads=1,
        **parallel,
    ) as llm:
        completions = llm.generate(PROMPTS, SAMPLING) + llm.generate(PROMPTS[:1], GREEDY)
        assert llm.flush_cache()
        if parallel:
            with pytest.raises(Unsupported, match="logprobs of the prompt are not served with dp_size above 1"):
                llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1, prompt_logprobs=1))
        return [(each.token_ids, [entry.logprob for entry in each.logprobs]) for each in completions]


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("deepseek-v3", {"tp_size": 2, "dp_size": 2, "ep_size": 2}),
        ("qwen3-moe-some-layers-dense", {"tp_size": 4, "dp_size": 2, "ep_size": 2}),
        ("gemma3", {"tp_size": 2, "dp_size": 2}),
    ],
)
def test_groups_answer_as_one_rank(case: str, sizes: dict[str, int], tmp_path: Path) -> None:
    reference_model(case).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    expected = answers(tmp_path)
    found = answers(tmp_path, **sizes)
    assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
