"""What a synchronous step asks of its model: all tokens' hidden states only where somebody reads them."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from diptych.attention.backend import AttentionBackend, ForwardInputs
from diptych.core.batch import Admission, SequenceStep
from diptych.core.request import SamplingParams
from diptych.models.transformer import Transformer
from diptych.worker.runner import TorchStepModel
from diptych.worker.slots import SlotTable


class PositionModel:
    """A token's hidden state is its id."""

    def __call__(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        return inputs.token_ids[:, None].float()

    def forward_logit_rows(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        return self(inputs, attention)[inputs.logit_rows]


@pytest.mark.parametrize("wants_prompt", [False, True])
def test_all_tokens_only_for_prompt_logprobs(wants_prompt: bool) -> None:
    slots = SlotTable(3, 64, 4)
    samplings = [SamplingParams(), SamplingParams(prompt_logprobs=0 if wants_prompt else None), SamplingParams()]
    steps = []
    for slot, (sampling, samples) in enumerate(zip(samplings, [True, False, True], strict=True)):
        token_ids = list(range(10 * slot, 10 * slot + 4))
        slots.admit(Admission(slot, f"r{slot}", token_ids, 4, sampling, (1,), 10))
        slots.append_pages(SequenceStep(slot, 0, 1, [slot], False))
        steps.append(SequenceStep(slot, 0, 4, [], samples))
    step_model = TorchStepModel(cast(Transformer, PositionModel()), cast(AttentionBackend, None), torch.device("cpu"))
    hidden, rows = step_model.hidden(steps, slots)
    assert hidden[rows].flatten().tolist() == [3, 23]
    assert hidden.shape[0] == (12 if wants_prompt else 2)
