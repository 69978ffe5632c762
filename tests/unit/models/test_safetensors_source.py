"""Reading by name and slice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from diptych.errors import ConfigError
from diptych.models.safetensors_files import find_safetensors
from diptych.models.safetensors_source import SafetensorsSource, canonical_name


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_reads_what_was_saved(
    max_shard_size: str, tiny_model: Callable[[str], PreTrainedModel], tiny_folder: Callable[..., Path]
) -> None:
    source = SafetensorsSource(find_safetensors(tiny_folder("llama", max_shard_size=max_shard_size)))
    expected = tiny_model("llama").state_dict()
    assert sorted(source.names()) == sorted(expected)
    for name, weight in expected.items():
        assert source.has(name) and source.shape(name) == tuple(weight.shape)
        assert torch.equal(source.read(name), weight)
        assert torch.equal(source.read(name, start=3, stop=10), weight[3:10])
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(source.read(name, dim=1, start=8), expected[name][:, 8:])


def test_missing_and_quantised_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(2, 2, dtype=torch.int8), "b": torch.tensor(1.5)}, file)
    source = SafetensorsSource([file])
    with pytest.raises(ConfigError, match="no tensor c"):
        source.read("c")
    with pytest.raises(ConfigError, match=r"a\.weight is of type I8"):
        source.shape("a.weight")
    assert source.shape("b") == () and source.read("b").item() == 1.5


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        ("layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("vision_tower.x", "vision_tower.x"),
    ],
)
def test_canonical_names(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical
