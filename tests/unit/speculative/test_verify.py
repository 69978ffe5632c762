"""Verified rows have the model's distribution, and every row is what it would be without guesses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from diptych.core.request import SamplingParams
from diptych.sampling.sampler import Sampler
from diptych.speculative.verify import verify

CPU = torch.device("cpu")
VOCAB = 6
LENGTH = 3
# The model: logits of the next token depend on the last one alone.
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
PROMPT = [2]


def distribution(temperature: float, top_k: int) -> torch.Tensor:
    logits = LOGITS / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return logits.softmax(dim=1).double()


def generate(sampler: Sampler, slots: list[int], guess) -> list[list[int]]:
    """LENGTH tokens for each slot, in as many rounds as the guesses take; a text is known from its slot's tokens."""
    texts = {slot: list(PROMPT) for slot in slots}
    while going := [slot for slot in slots if len(texts[slot]) <= LENGTH]:
        drafts = [guess(slot, texts[slot], LENGTH - len(texts[slot])) for slot in going]
        inputs = [[texts[slot][-1], *guesses] for slot, guesses in zip(going, drafts, strict=True)]
        logits = LOGITS[torch.tensor([token_id for row in inputs for token_id in row])]

        def take(slot: int, token_id: int) -> bool:
            texts[slot].append(token_id)
            return len(texts[slot]) > LENGTH

        def choose(index: torch.Tensor, rows: list[int], logits: torch.Tensor = logits):
            return sampler.sample(logits[index], rows)

        for slot, result in zip(going, verify(choose, going, drafts, take), strict=True):
            assert result.error is None
            assert texts[slot][-len(result.token_ids) :] == result.token_ids
    return [texts[slot][1:] for slot in slots]


def texts_of(sampling: dict[str, float], guess, *, count: int) -> list[list[int]]:
    """The texts of seeds 0 .. count - 1, 64 at a time."""
    found: list[list[int]] = []
    for start in range(0, count, 64):
        sampler = Sampler(VOCAB, 64, device=CPU, grammars=None)
        for slot in range(64):
            sampler.admit(slot, SamplingParams(seed=start + slot, **sampling), PROMPT, len(PROMPT), ())
        found += generate(sampler, list(range(64)), guess)
    return found


def likely(slot: int, text: list[int], most: int) -> list[int]:
    guesses = [text[-1]]
    for _ in range(most):
        guesses.append(int(LOGITS[guesses[-1]].argmax()))
    return guesses[1:]


def fixed(slot: int, text: list[int], most: int) -> list[int]:
    return [(slot + place) % VOCAB for place in range(max(0, min(most, slot % 3)))]


def none(slot: int, text: list[int], most: int) -> list[int]:
    return []


@pytest.mark.parametrize("guess", [likely, fixed])
@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 3}])
def test_chi_square(sampling, guess) -> None:
    count = 4096
    chances = distribution(sampling["temperature"], sampling.get("top_k", 0))
    observed = np.zeros((VOCAB,) * LENGTH)
    for text in texts_of(sampling, guess, count=count):
        observed[tuple(text)] += 1
    statistic, freedom = 0.0, -1
    rest = [0.0, 0.0]  # outcomes too rare for the statistic, together
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for before, after in itertools.pairwise((*PROMPT, *text)):
            chance *= float(chances[before, after])
        if chance == 0.0:
            assert observed[text] == 0
        elif chance * count < 5.0:
            rest = [rest[0] + chance * count, rest[1] + observed[text]]
        else:
            statistic += (observed[text] - chance * count) ** 2 / (chance * count)
            freedom += 1
    if rest[0] > 0.0:
        statistic += (rest[1] - rest[0]) ** 2 / rest[0]
        freedom += 1
    # Seeds are fixed, so this either holds or does not; four deviations are one in 30,000.
    assert statistic < freedom + 4.0 * (2.0 * freedom) ** 0.5


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "logprobs": 2, "min_tokens": 2, "stop_token_ids": (1,)},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_the_same_text_without_guesses(sampling) -> None:
    plain = texts_of(sampling, none, count=64)
    assert texts_of(sampling, likely, count=64) == plain
    assert texts_of(sampling, fixed, count=64) == plain


def test_an_unsound_row_is_an_error_of_its_own() -> None:
    sampler = Sampler(VOCAB, 2, device=CPU, grammars=None)
    for slot in range(2):
        sampler.admit(slot, SamplingParams(temperature=0.0), PROMPT, 1, ())
    logits = LOGITS[torch.tensor([2, int(LOGITS[2].argmax()), 3])].clone()
    logits[1] = torch.nan
    results = verify(
        lambda index, rows: sampler.sample(logits[index], rows),
        [0, 1],
        [[int(LOGITS[2].argmax())], []],
        lambda slot, token_id: False,
    )
    assert results[0].error is not None and results[0].token_ids == []
    assert results[1].token_ids == [int(LOGITS[3].argmax())]
