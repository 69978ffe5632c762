"""Memory that is released is the system's again, and comes back with the very same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.config import ModelConfig
from diptych.core.calls import CommitWeights, GetWeights, StageWeights
from diptych.errors import RequestError, Unavailable
from diptych.kernels.memory import empty_weight, give_back
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.loader import load_model
from diptych.models.named_tensors import tensor_bytes
from diptych.models.spec import inspect_model
from diptych.worker.occupancy import Occupancy
from diptych.worker.weights import ModelWeights

MIB = 1024 * 1024
NAMES = ["model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight", "model.layers.0.input_layernorm.weight"]


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 60 MiB in bfloat16."""
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Rank:
    def __init__(self, path: Path, quantization: str, load_format: Literal["auto", "dummy"] = "dummy") -> None:
        spec = inspect_model(ModelConfig(model_path=str(path), load_format=load_format))
        dtype, device = torch.bfloat16, torch.device("cpu")
        self.model = load_model(spec, dtype=dtype, device=device, quantization=quantization)  # type: ignore[arg-type]
        self.weights = ModelWeights(self.model, spec, dtype=dtype, quantization=quantization)
        config = spec.config
        layout = KVLayout.single_rank(
            config.num_layers, config.num_kv_heads, head_dim=config.head_dim, page_size=16, dtype="bfloat16"
        )
        self.pool = KVPool(layout, 64 * MIB // layout.page_nbytes, device, dtype)
        self.pool.tensor.fill_(1.0)
        self.occupancy = Occupancy(self.model, self.weights, self.pool)

    @property
    def weights_nbytes(self) -> int:
        return sum(place.nbytes for place in self.occupancy._places())

    def values(self) -> bytes:
        return self.weights.obey(GetWeights(NAMES, stop=600))


@pytest.mark.parametrize("quantization", ["none", "int8", "gguf"])
def test_weights_and_pages_are_returned_and_come_back(
    folder: Path, demo_model: Path, quantization: str, cache_dir: Path
) -> None:
    rank = Rank(demo_model, "gguf", "auto") if quantization == "gguf" else Rank(folder, quantization)
    held, before, address = rank.values(), rss(), rank.pool.data_ptr
    expected = rank.weights_nbytes + rank.pool.nbytes
    assert expected > 80 * MIB
    rank.occupancy.free(["weights", "kv_cache"])
    freed = before - rss()
    assert freed > 0.9 * expected
    with pytest.raises(Unavailable, match="resume_memory_occupation"):
        rank.weights.obey(GetWeights(NAMES))
    rank.occupancy.free(["weights", "kv_cache"])
    rank.occupancy.restore(["kv_cache"])
    assert rank.pool.data_ptr == address and not rank.pool.tensor[:2].any()
    rank.occupancy.restore(["weights"])
    assert rank.values() == held


def test_weights_that_no_file_holds_wait_in_one(folder: Path, cache_dir: Path) -> None:
    rank = Rank(folder, "int8")
    changed = torch.full((rank.model.config.hidden_size,), 0.5)
    rank.weights.obey(StageWeights("u", [tensor_bytes("model.norm.weight", changed)]))
    rank.weights.obey(CommitWeights("u"))
    places = [place.clone() for place in rank.occupancy._places()]
    rank.occupancy.free(["weights"])
    assert not rank.model.embed_tokens.packed.weight.any()
    rank.occupancy.restore(["weights"])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(places, rank.occupancy._places(), strict=True))


def test_a_checkpoint_that_changed_is_not_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = file.read_bytes()
    rank = Rank(tmp_path, "none", "auto")
    held = rank.values()
    rank.occupancy.free(["weights"])
    file.write_bytes(stored[:-64] + bytes(64))
    with pytest.raises(RequestError, match="has changed"):
        rank.occupancy.restore(["weights"])
    file.write_bytes(stored)
    rank.occupancy.restore(["weights"])
    assert rank.values() == held


def test_neighbours_keep_their_memory() -> None:
    first, middle, last = (empty_weight((100_000,), torch.uint8).fill_(index) for index in (1, 2, 3))
    give_back(middle)
    assert first.eq(1).all() and last.eq(3).all()
    assert middle[:64].eq(2).all() or not middle[:64].any()
    assert not middle[50_000:60_000].any()
