"""Tensors out of GGUF against the Hugging Face weights they were made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf import quants
from transformers import AutoModelForCausalLM, PreTrainedModel

from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile
from diptych.models import gguf_source
from diptych.models.gguf import config_from_gguf
from diptych.models.gguf_source import GGUFSource, dequantise

NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]


def open_source(path: Path, dtype: torch.dtype = torch.float32) -> GGUFSource:
    file = GGUFFile(path)
    return GGUFSource(file, config_from_gguf(file), dtype=dtype)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_the_original(
    name: str, tiny_model: Callable[[str], PreTrainedModel], tiny_gguf: Callable[..., Path]
) -> None:
    source = open_source(tiny_gguf(name))
    expected = tiny_model(name).state_dict()
    if name in ("qwen2", "gemma3"):  # tied
        del expected["lm_head.weight"]
        assert not source.has("lm_head.weight")
    assert sorted(source.names()) == sorted(expected)
    for tensor_name, weight in expected.items():
        assert source.has(tensor_name)
        assert source.shape(tensor_name) == tuple(weight.shape)
        torch.testing.assert_close(source.read(tensor_name), weight, rtol=0, atol=1e-7, msg=tensor_name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_elements", [1, 300, 1 << 18])
def test_slices_are_parts_of_the_whole(
    name: str, chunk_elements: int, tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_source, "CHUNK_ELEMENTS", chunk_elements)
    source = open_source(tiny_gguf(name, "Q8_0"))
    for tensor_name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = source.read(tensor_name)
        assert torch.equal(source.read(tensor_name, dim=0, start=8, stop=24), whole[8:24])
        assert torch.equal(source.read(tensor_name, dim=1, start=16, stop=48), whole[:, 16:48])
        assert torch.equal(source.read(tensor_name, dim=1, start=32), whole[:, 32:])
    norm = source.read("model.norm.weight")
    assert torch.equal(source.read("model.norm.weight", start=3, stop=9), norm[3:9])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_equal_the_librarys(kind: str, tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("gemma3", kind)
    source = open_source(path)
    names = {
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    compared = 0
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in names:
            expected = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(source.read(names[tensor.name]), expected)
            compared += 1
    assert compared == len(names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_rounded_from_float32(dtype: torch.dtype, tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("gemma3", "Q8_0")
    full, rounded = open_source(path), open_source(path, dtype)
    for name in full.names():
        assert torch.equal(rounded.read(name), full.read(name).to(dtype)), name


def test_results_do_not_alias_the_file(tiny_gguf: Callable[..., Path]) -> None:
    source = open_source(tiny_gguf("llama"))
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        before = source.read(name)
        source.read(name).zero_()
        assert torch.equal(source.read(name), before)


def test_missing_tensor_is_named(tiny_gguf: Callable[..., Path]) -> None:
    source = open_source(tiny_gguf("llama"))
    for read in (source.shape, source.read):
        with pytest.raises(ConfigError, match=r"no tensor model\.layers\.9\.mlp\.up_proj\.weight"):
            read("model.layers.9.mlp.up_proj.weight")
    assert not source.has("model.layers.0.self_attn.q_norm.weight")


def test_every_supported_kind_has_a_dequantiser() -> None:
    from diptych.models.gguf import DEQUANTISABLE

    for kind in DEQUANTISABLE:
        block_len, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
        rows = torch.zeros((2, 3 * block_nbytes), dtype=torch.uint8).numpy()
        assert dequantise(rows, kind).shape == (2, 3 * block_len)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_demo_equals_transformers(demo_model: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    expected = AutoModelForCausalLM.from_pretrained(demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32)
    source = open_source(demo_model, dtype)
    for name, weight in expected.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(source.read(name), weight.to(dtype)), name
