"""Whole models: weights in place, checkpoints that do not fit refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from diptych.config import ModelConfig
from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile
from diptych.models.loader import load_model
from diptych.models.shapes import tensor_shapes
from diptych.models.spec import ModelSpec, inspect_model
from diptych.models.transformer import Transformer


def inspect(path: Path, **options: object) -> ModelSpec:
    return inspect_model(ModelConfig(model_path=str(path), **options))  # type: ignore[arg-type]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(inspect(path), dtype=dtype, device="cpu")


def assert_holds(model: Transformer, weights: dict[str, torch.Tensor]) -> None:
    """Spot checks through the layers: embedding, merged q, k, v, the last matrix."""
    assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    parts = [weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(model.layers[1].self_attn.qkv.weight, torch.cat(parts))
    assert torch.equal(model.layers[2].self_attn.o_proj.weight, weights["model.layers.2.self_attn.o_proj.weight"])


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_folder(
    architecture: str,
    max_shard_size: str,
    tiny_model: Callable[[str], PreTrainedModel],
    tiny_folder: Callable[..., Path],
) -> None:
    model = load(tiny_folder(architecture, max_shard_size=max_shard_size))
    assert_holds(model, tiny_model(architecture).state_dict())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_gguf(tiny_model: Callable[[str], PreTrainedModel], tiny_gguf: Callable[..., Path]) -> None:
    for name in ("llama", "qwen2", "qwen3"):
        assert_holds(load(tiny_gguf(name)), tiny_model(name).state_dict())


def test_weights_outlive_their_files(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    model = load(folder)
    before = model.norm.weight.clone()
    (folder / "model.safetensors").write_bytes(b"\0" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(model.norm.weight, before)


def test_progress_counts_every_tensor_once(tiny_gguf: Callable[..., Path]) -> None:
    calls: list[tuple[str, int, int]] = []
    spec = inspect(tiny_gguf("gemma3"))
    load_model(spec, dtype=torch.bfloat16, device="cpu", progress=lambda *call: calls.append(call))
    total = len(tensor_shapes(spec.config))
    assert calls == [("weights", done, total) for done in range(1, total + 1)]


def test_dummy_weights_need_a_config_only(
    architecture: str, tiny_folder: Callable[..., Path], tiny_gguf: Callable[..., Path]
) -> None:
    folder = tiny_folder(architecture)
    (folder / "model.safetensors").unlink()
    spec = inspect(folder, load_format="dummy", seed=3)
    assert (spec.weight_format, spec.files, spec.seed) == ("dummy", (), 3)
    first, second = (load_model(spec, dtype=torch.float32, device="cpu") for _ in range(2))
    for name, parameter in first.named_parameters():
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, second.get_parameter(name))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_missing_tensor_is_found_before_memory_is_taken(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("llama")
    edit_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    devices = record_devices(monkeypatch)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        load(folder)
    assert devices == {"meta"}


def record_devices(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Where embeddings are allocated from now on."""
    from diptych.layers import embedding

    devices: set[str] = set()
    allocate = embedding.new_parameter

    def recording(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> torch.nn.Parameter:
        devices.add(str(device))
        return allocate(shape, dtype=dtype, device=device)

    monkeypatch.setattr(embedding, "new_parameter", recording)
    return devices


def test_wrong_shape_is_found_before_memory_is_taken(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("llama")
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(63)}))
    devices = record_devices(monkeypatch)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[63\]"):
        load(folder)
    assert devices == {"meta"}


def test_unused_tensors_are_reported(tiny_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_folder("llama")
    extra = {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
        "model.layers.0.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_weights(folder, lambda weights: weights.update(extra))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} holds 1 tensors that LlamaForCausalLM does not use: model.layers.0.self_attn.q_proj.bias"
    ]


def test_bare_decoder_checkpoint(tiny_model: Callable[[str], PreTrainedModel], tmp_path: Path) -> None:
    """Gemma3TextModel: the same tensors without "model." in front."""
    whole = tiny_model("gemma3")
    whole.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Gemma3TextModel"]
    assert_holds(load(tmp_path), whole.state_dict())


def test_demo_loads_in_bfloat16(demo_model: Path) -> None:
    model = load(demo_model, torch.bfloat16)
    assert model.embed_tokens.weight.numel() == 262144 * 640  # as rows, or in the order of the CPU kernels
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    file = GGUFFile(demo_model)
    stored = file.rows(file.tensors["token_embd.weight"])[4242:4243]
    row = gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0)
    model.embed_tokens.scale = None
    assert torch.equal(model.embed_tokens(torch.tensor([4242]))[0], torch.from_numpy(row[0]).to(torch.bfloat16))
