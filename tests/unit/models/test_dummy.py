"""Random weights: complete, repeatable, sliceable, tame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.errors import ConfigError
from diptych.models import dummy
from diptych.models.dummy import DummySource
from diptych.models.huggingface import config_from_folder


def test_same_seed_same_weights(architecture: str, tiny_folder: Callable[..., Path]) -> None:
    config = config_from_folder(tiny_folder(architecture))
    first, again, other = DummySource(config, seed=1), DummySource(config, seed=1), DummySource(config, seed=2)
    for name in reversed(first.names()):
        again.read(name)
    for name in first.names():
        weight = first.read(name)
        assert tuple(weight.shape) == first.shape(name)
        assert torch.equal(weight, again.read(name)), name
        assert not torch.equal(weight, other.read(name)), name


@pytest.mark.parametrize("period", [7, 61, 1048573])
def test_slices_are_parts_of_the_whole(
    period: int, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy, "PERIOD", period)
    source = DummySource(config_from_folder(tiny_folder("llama")))
    name = "model.layers.0.mlp.down_proj.weight"
    whole = source.read(name)
    assert torch.equal(source.read(name, start=5, stop=17), whole[5:17])
    assert torch.equal(source.read(name, dim=1, start=5, stop=17), whole[:, 5:17])


def test_rows_differ_and_scale_is_kept(tiny_folder: Callable[..., Path]) -> None:
    source = DummySource(config_from_folder(tiny_folder("gemma3")))
    weight = source.read("model.embed_tokens.weight")
    assert len({tuple(row.tolist()) for row in weight}) == weight.shape[0]
    assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)
    assert source.read("model.norm.weight").abs().max() < 0.2
    llama = DummySource(config_from_folder(tiny_folder("llama")))
    assert (llama.read("model.norm.weight") - 1).abs().max() < 0.2


def test_dtype_and_unknown_names(tiny_folder: Callable[..., Path]) -> None:
    source = DummySource(config_from_folder(tiny_folder("qwen2")), dtype=torch.bfloat16)
    assert source.read("model.norm.weight").dtype == torch.bfloat16
    assert not source.has("lm_head.weight")
    with pytest.raises(ConfigError, match="no tensor x"):
        source.read("x")
