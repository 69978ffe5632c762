"""PEFT folders: what is read, and what is refused, naming the field or tensor at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_decoder_layer import tiny_model

from diptych.errors import AdapterError, ConfigError
from diptych.models.adapter_files import AdapterFile, read_adapter
from diptych.models.adapters import ModelAdapters

MODULE = "model.layers.0.self_attn.q_proj"
NAME = f"base_model.model.{MODULE}"
TENSORS = {f"{NAME}.lora_A.weight": torch.ones(4, 64), f"{NAME}.lora_B.weight": torch.ones(128, 4)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}


def write(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(TENSORS if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path) -> AdapterFile:
    return read_adapter(folder, max_rank=64)


def test_scale_and_rank(tmp_path: Path) -> None:
    found = read(write(tmp_path / "plain"))
    assert (found.rank, found.modules[MODULE].scale) == (4, 2.0)
    assert read(write(tmp_path / "stable", {"use_rslora": True})).modules[MODULE].scale == 4.0
    patterns = {"r": 9, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0.self_attn.q_proj": 2}}
    assert read(write(tmp_path / "patterns", patterns)).modules[MODULE].scale == 0.5


def test_digest_is_of_what_it_computes(tmp_path: Path) -> None:
    digest = read(write(tmp_path / "a")).digest
    assert read(write(tmp_path / "b", {"base_model_name_or_path": "elsewhere"})).digest == digest
    assert read(write(tmp_path / "c", {"lora_alpha": 9})).digest != digest
    other = {name: tensor * 2 for name, tensor in TENSORS.items()}
    assert read(write(tmp_path / "d", tensors=other)).digest != digest


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"use_dora": True}, "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices \[3\]"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"r": 0}, "r 0"),
        ({"lora_alpha": "8"}, "lora_alpha '8'"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern"),
        ({"r": 5}, "are not of rank 5"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=text):
        read(write(tmp_path / "x", config))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}, "lora_embedding_A"),
        ({f"{NAME}.lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector"),
        ({f"{NAME}.lora_A.weight": torch.ones(4, 64)}, f"lora_A of {MODULE} alone"),
        ({}, "holds no tensors"),
    ],
)
def test_tensors_that_are_refused(tensors: dict[str, torch.Tensor], text: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=text):
        read(write(tmp_path / "x", tensors=tensors))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config.json"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors"):
        read(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ConfigError, match="damaged or truncated"):
        read(tmp_path)
    with pytest.raises(AdapterError, match="rank 4, above --max-lora-rank 2"):
        read_adapter(write(tmp_path / "large"), max_rank=2)


@pytest.mark.parametrize(
    ("module", "shapes", "text"),
    [
        ("lm_head", (64, 128), "changes lm_head, which is nothing that adapters may change here"),
        ("model.layers.9.mlp.up_proj", (64, 96), r"changes model\.layers\.9\.mlp\.up_proj"),
        (MODULE, (48, 128), r"q_proj is \[128, 48\] .*the base model's is \[128, 64\]"),
        (MODULE, (64, 96), r"q_proj is \[96, 64\] .*the base model's is \[128, 64\]"),
    ],
)
def test_adapters_of_other_models(module: str, shapes: tuple[int, int], text: str, tmp_path: Path) -> None:
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(4, shapes[0]),
        f"base_model.model.{module}.lora_B.weight": torch.ones(shapes[1], 4),
    }
    found = read(write(tmp_path / "x", tensors=tensors))
    with pytest.raises(AdapterError, match=text):
        ModelAdapters(tiny_model("LlamaForCausalLM"), 1).prepare(found.modules, "x")
