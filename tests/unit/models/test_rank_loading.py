"""What a rank reads of a checkpoint: its own slice of every tensor, of safetensors and of GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from thread_ranks import ThreadWorld, run_ranks

from diptych.config import ModelConfig
from diptych.errors import ConfigError
from diptych.kernels.gguf_linear import GGUFLinear
from diptych.kernels.library import kernels
from diptych.layers.shard import Part, Share
from diptych.models.gguf_source import GGUFSource
from diptych.models.loader import load_model, open_source
from diptych.models.safetensors_source import SafetensorsSource
from diptych.models.spec import inspect_model
from diptych.models.transformer import Transformer
from diptych.parallel.mesh import MeshSizes

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")


class CountingSource(SafetensorsSource):
    """Counts the bytes that are read."""

    nbytes = 0

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = super().read(name, dim=dim, start=start, stop=stop)
        self.nbytes += tensor.nbytes
        return tensor


def load(path: Path, world: ThreadWorld, **options: object) -> Transformer:
    spec = inspect_model(ModelConfig(model_path=str(path)))
    return load_model(spec, **{"dtype": torch.float32, "device": "cpu", "groups": world.groups, **options})


@pytest.mark.parametrize("sizes", [MeshSizes(tp=2), MeshSizes(tp=4), MeshSizes(pp=3), MeshSizes(tp=2, pp=2)], ids=str)
def test_ranks_read_no_more_than_they_keep(
    sizes: MeshSizes, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("llama-biased")
    sources: list[CountingSource] = []

    def counting(files: list[Path]) -> CountingSource:
        sources.append(CountingSource(files))
        return sources[-1]

    monkeypatch.setattr("diptych.models.loader.SafetensorsSource", counting)
    models = run_ranks(sizes, lambda world: load(folder, world))
    kept = [sum(parameter.nbytes for parameter in model.parameters()) for model in models]
    assert sorted(source.nbytes for source in sources) == sorted(kept)
    whole = sum(tensor.nbytes for tensor in load_all(folder).values())
    # Norms, and biases that are added after the sum, are on all ranks of a stage; with tp 4 two ranks hold a KV head.
    assert sum(kept) < whole * (1.0 if sizes.tp == 1 else 1.25) + 1
    assert max(kept) < whole * 1.3 / sizes.world + whole * 0.1


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    source = SafetensorsSource([folder / "model.safetensors"])
    return {name: source.read(name) for name in source.names()}


def test_a_tied_table_is_read_by_both_ends(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("qwen2")
    first, last = run_ranks(MeshSizes(pp=2), lambda world: load(folder, world))
    assert torch.equal(first.embed_tokens.weight, last.lm_head.weight)
    assert [len(first.layers), len(last.layers)] == [2, 1]


@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_a_gguf_file_is_cut_as_it_is_expanded(kind: str, tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", kind)
    spec = inspect_model(ModelConfig(model_path=str(path)))
    whole = open_source(spec, dtype=torch.float32)
    models = run_ranks(MeshSizes(tp=2), lambda world: load(path, world))
    down = torch.cat([model.layers[0].mlp.down.weight for model in models], dim=1)
    assert torch.equal(down, whole.read("model.layers.0.mlp.down_proj.weight"))
    queries = torch.cat([model.layers[0].self_attn.qkv.weight[:32] for model in models])
    assert torch.equal(queries, whole.read("model.layers.0.self_attn.q_proj.weight"))


@needs_kernels
def test_columns_that_are_no_whole_blocks_are_refused(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", "Q8_0")
    words = r"48 of 96 inputs of model\.layers\.0\.mlp\.down_proj\.weight are no whole blocks of 32 \(Q8_0\)"
    with pytest.raises(ConfigError, match=words):
        run_ranks(MeshSizes(tp=2), lambda world: load(path, world, dtype=torch.bfloat16, quantization="gguf"))


@needs_kernels
def test_stored_columns_are_the_bytes_of_these_columns(tiny_gguf: Callable[..., Path]) -> None:
    """A linear layer over half the columns' blocks, against the expanded half."""
    spec = inspect_model(ModelConfig(model_path=str(tiny_gguf("llama", "Q8_0"))))
    source = open_source(spec, dtype=torch.bfloat16, keeps_blocks=True)
    assert isinstance(source, GGUFSource)
    name = "model.layers.0.self_attn.o_proj.weight"
    x = torch.randn(3, 32).bfloat16()
    blocks = source.blocks(name, Part(Share(32, 64, 64), dim=1))
    assert blocks is not None
    expected = x.float() @ source.read(name, dim=1, start=32, stop=64).float().T
    torch.testing.assert_close(GGUFLinear((blocks,))(x).float(), expected, rtol=2e-2, atol=2e-2)


@needs_kernels
def test_stored_rows_are_those_of_a_ranks_heads(tiny_gguf: Callable[..., Path]) -> None:
    """In the order of Hugging Face, which is not the file's."""
    spec = inspect_model(ModelConfig(model_path=str(tiny_gguf("llama", "Q8_0"))))
    source = open_source(spec, dtype=torch.bfloat16, keeps_blocks=True)
    assert isinstance(source, GGUFSource)
    name = "model.layers.0.self_attn.q_proj.weight"
    blocks = source.blocks(name, Part(Share(32, 64, 64)))
    assert blocks is not None
    x = torch.randn(3, 64).bfloat16()
    expected = x.float() @ source.read(name, start=32, stop=64).float().T
    torch.testing.assert_close(GGUFLinear((blocks,))(x).float(), expected, rtol=2e-2, atol=2e-2)
