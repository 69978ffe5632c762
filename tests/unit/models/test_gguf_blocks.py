"""Models computed on a GGUF file's own blocks against the same file expanded to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.config import ModelConfig
from diptych.errors import ConfigError
from diptych.kernels.gguf_linear import GGUFLinear
from diptych.kernels.library import kernels
from diptych.kernels.linear import Quantization
from diptych.models.loader import load_model
from diptych.models.spec import inspect_model
from diptych.models.transformer import Transformer

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")


def load(path: Path, quantization: Quantization, **options: object) -> Transformer:
    spec = inspect_model(ModelConfig(model_path=str(path)))
    return load_model(spec, **{"dtype": torch.bfloat16, "device": "cpu", "quantization": quantization, **options})


@pytest.mark.parametrize("name", ["llama", "llama-biased", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_every_matrix_is_kept_and_means_the_same(name: str, kind: str, tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf(name, kind)
    kept, expanded = load(path, "gguf"), load(path, "none")
    x, tokens = torch.randn(5, 64).bfloat16(), torch.tensor([3, 95, 0])
    assert torch.equal(kept.embed_tokens(tokens), expanded.embed_tokens(tokens))
    torch.testing.assert_close(kept.logits(x), expanded.logits(x), rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(kept.layers, expanded.layers, strict=True):
        for part in (ours.self_attn.qkv, ours.self_attn.o_proj, ours.mlp.gate_up, ours.mlp.down):
            assert isinstance(part.packed, GGUFLinear) and part.stored is None
        torch.testing.assert_close(ours.self_attn.qkv(x), theirs.self_attn.qkv(x), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(ours.mlp(x), theirs.mlp(x), rtol=2e-2, atol=2e-2)


def test_memory_of_the_weights(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("gemma3", "Q4_0")

    def matrix_nbytes(model: Transformer) -> int:
        return sum(weight.nbytes for weight in {id(w): w for w in model.parameters()}.values() if weight.numel() > 1024)

    assert matrix_nbytes(load(path, "gguf")) < 0.3 * matrix_nbytes(load(path, "none"))


def test_matrices_that_are_no_blocks_are_read(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("qwen3", "F32")
    kept, expanded = load(path, "gguf"), load(path, "none")
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(kept.layers[0].mlp(x), expanded.layers[0].mlp(x))


def test_progress_tells_of_every_tensor(tiny_gguf: Callable[..., Path]) -> None:
    told: list[tuple[str, int, int]] = []
    load(tiny_gguf("qwen2", "Q8_0"), "gguf", progress=lambda *news: told.append(news))
    assert [done for _, done, _ in told] == list(range(1, told[-1][2] + 1))


def test_refused_without_a_gguf_or_in_another_dtype(
    tiny_gguf: Callable[..., Path], tiny_folder: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="keeps the blocks of a GGUF file"):
        load(tiny_folder("qwen3"), "gguf")
    with pytest.raises(ConfigError, match="needs the CPU kernels and dtype bfloat16"):
        load(tiny_gguf("qwen3", "Q8_0"), "gguf", dtype=torch.float32)
