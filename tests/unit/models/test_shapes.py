"""The tensors that a configuration implies, against transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from diptych.models.huggingface import config_from_folder
from diptych.models.shapes import tensor_shapes


def test_equals_the_state_dict(
    architecture: str, tiny_model: Callable[[str], PreTrainedModel], tiny_folder: Callable[..., Path]
) -> None:
    config = config_from_folder(tiny_folder(architecture))
    expected = {name: tuple(weight.shape) for name, weight in tiny_model(architecture).state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert tensor_shapes(config) == expected
