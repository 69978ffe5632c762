from __future__ import annotations

import pytest
import torch

from diptych.core.request import SamplingParams
from diptych.sampling.logprobs import output_logprobs, prompt_logprobs


@pytest.mark.parametrize("vocab_size", [60, 9000])
def test_values_ranks_top_and_extra_agree_with_log_softmax(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, vocab_size) * 3
    token_ids = torch.tensor([0, 7, 59, 3, int(logits[4].argmax())])
    samplings = [SamplingParams(logprobs=count, logprob_token_ids=(5, 1)) for count in (0, 1, 5, 128, 3)]
    reference = torch.log_softmax(logits.double(), dim=-1)
    for row, entry in enumerate(output_logprobs(logits, token_ids, samplings)):
        token = int(token_ids[row])
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(reference[row, token]), abs=1e-5)
        assert entry.rank == int((logits[row] > logits[row, token]).sum()) + 1
        expected = torch.topk(reference[row], min(samplings[row].logprobs or 0, vocab_size))
        assert [token for token, _ in entry.top] == expected.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected.values.tolist(), abs=1e-5)
        assert entry.extra == [
            (5, pytest.approx(float(reference[row, 5]), abs=1e-5)),
            (1, pytest.approx(float(reference[row, 1]), abs=1e-5)),
        ]
    assert entry.rank == 1


def test_prompt_logprobs_predict_the_next_tokens() -> None:
    logits = torch.randn(40, 300, dtype=torch.bfloat16)
    next_ids = torch.randint(0, 300, (40,)).tolist()
    reference = torch.log_softmax(logits.float(), dim=-1)
    entries = prompt_logprobs(logits, next_ids, SamplingParams(prompt_logprobs=2))
    assert [entry.token_id for entry in entries] == next_ids
    assert [entry.logprob for entry in entries] == pytest.approx(
        [float(reference[row, token]) for row, token in enumerate(next_ids)], abs=1e-5
    )
    assert all(len(entry.top) == 2 for entry in entries)
    assert prompt_logprobs(logits, next_ids, SamplingParams()) == []


def test_many_rows_are_done_in_groups_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50)
    whole = prompt_logprobs(logits, list(range(7)), SamplingParams(prompt_logprobs=3))
    monkeypatch.setattr("diptych.sampling.logprobs._MAX_GROUP_NUMEL", 100)
    grouped = prompt_logprobs(logits, list(range(7)), SamplingParams(prompt_logprobs=3))
    assert [entry.token_id for entry in grouped] == list(range(7))
    for one, other in zip(whole, grouped, strict=True):
        assert one.logprob == pytest.approx(other.logprob)
        assert one.top == [(token, pytest.approx(value)) for token, value in other.top]
