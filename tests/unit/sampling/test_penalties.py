from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diptych.core.request import SamplingParams
from diptych.errors import RequestError
from diptych.sampling.penalties import LogitBias, Penalties

CPU = torch.device("cpu")
VOCAB = 40


def naive(
    logits: NDArray[np.float32], sampling: SamplingParams, prompt: list[int], output: list[int]
) -> NDArray[np.float32]:
    logits = logits.copy()
    for token in range(len(logits)):
        if token in prompt or token in output:
            scale = sampling.repetition_penalty
            logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        count = output.count(token)
        logits[token] -= sampling.frequency_penalty * count
        logits[token] -= sampling.presence_penalty * (count > 0)
    return logits


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)
params = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -2.0]),
    repetition_penalty=st.sampled_from([0.5, 1.3]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(params, tokens, tokens, tokens), min_size=1, max_size=4), st.integers(0, 1000))
def test_penalties_equal_the_naive_ones(
    requests: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int
) -> None:
    penalties = Penalties(VOCAB, device=CPU)
    logits = torch.randn(len(requests) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = logits.numpy().copy()
    for slot, (sampling, prompt, replayed, sampled) in enumerate(requests):
        penalties.admit(slot, sampling, prompt + replayed, len(prompt))
        for token in sampled:
            penalties.record([slot], torch.tensor([token]))
        expected[slot + 1] = naive(expected[slot + 1], sampling, prompt, replayed + sampled)
    slots = list(range(len(requests)))
    penalties.apply(logits, [slot + 1 for slot in slots], slots)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_released_slot_leaves_no_counts_behind() -> None:
    penalties = Penalties(VOCAB, device=CPU)
    sampling = SamplingParams(frequency_penalty=1.0)
    penalties.admit(3, sampling, [1, 2, 3, 3], 1)
    for _ in range(600):  # beyond the first buffer
        penalties.record([3], torch.tensor([7]))
    penalties.release(3)
    penalties.release(3)
    penalties.admit(5, sampling, [9, 7], 1)
    logits = torch.zeros(1, VOCAB)
    penalties.apply(logits, [0], [5])
    assert logits[0, 7] == -1.0
    assert torch.count_nonzero(logits) == 1


def test_bias_is_added_and_foreign_tokens_are_refused() -> None:
    bias = LogitBias(VOCAB, device=CPU)
    bias.admit(0, {3: -100.0, 39: 2.5})
    logits = torch.ones(2, VOCAB)
    bias.apply(logits, [1], [0])
    assert logits[1, 3] == -99.0
    assert logits[1, 39] == 3.5
    assert logits.sum() == 2 * VOCAB - 97.5
    with pytest.raises(RequestError, match="token 40") as raised:
        bias.admit(1, {40: 1.0})
    assert raised.value.param == "logit_bias"
