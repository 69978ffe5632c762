"""Frequencies against transformers' for every scaling."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diptych.models.config import RopeScaling
from diptych.models.rope import rope_frequencies

CASES = [
    RopeScaling(kind="linear", factor=8.0),
    RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeScaling(kind="llama3", factor=32.0, original_max_position_embeddings=512),
    RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32768),
    RopeScaling(kind="yarn", factor=16.0, beta_fast=20.0, beta_slow=2.0, attention_factor=1.5),
    RopeScaling(kind="yarn", factor=1.0, original_max_position_embeddings=64),
]


@pytest.mark.parametrize("scaling", CASES, ids=lambda scaling: f"{scaling.kind}-{scaling.factor}")
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_equals_transformers(scaling: RopeScaling, theta: float, head_dim: int) -> None:
    parameters = {
        "rope_type": scaling.kind,
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    if scaling.attention_factor is not None:
        parameters["attention_factor"] = scaling.attention_factor
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=1 << 20)
    expected, expected_magnitude = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    frequencies, magnitude = rope_frequencies(head_dim, theta, scaling)
    torch.testing.assert_close(frequencies, expected, rtol=2e-6, atol=0)
    assert magnitude == pytest.approx(expected_magnitude)


def test_plain_frequencies() -> None:
    frequencies, magnitude = rope_frequencies(4, 100.0, None)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
    assert magnitude == 1.0
