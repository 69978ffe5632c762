"""Reading and replacing the weights of a loaded model: by name, in pieces, from a file, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from diptych.config import ModelConfig
from diptych.core.calls import (
    CommitWeights,
    DropStagedWeights,
    GetWeights,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReceiveWeights,
    StageCheckpoint,
    StageWeights,
    TensorBytes,
)
from diptych.errors import RequestError, Unavailable, Unsupported
from diptych.models.loader import load_model
from diptych.models.named_tensors import tensor_bytes
from diptych.models.spec import inspect_model
from diptych.parallel.weights_group import WeightsGroup
from diptych.worker.weights import ModelWeights

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
}
# Not whole blocks of 16 outputs and 32 inputs, so that packed weights are padded.
ODD = {**SIZES, "intermediate_size": 88, "vocab_size": 90}


def make_model(name: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(**ODD, attention_bias=True) if name == "odd" else CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 8)
    return model


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def save(name: str, seed: int = 0) -> Path:
        path = tmp_path / f"{name}-{seed}"
        make_model(name, seed).save_pretrained(path)
        return path

    return save


def load(path: Path, quantization: str = "none", dtype: torch.dtype = torch.bfloat16) -> ModelWeights:
    spec = inspect_model(ModelConfig(model_path=str(path)))
    model = load_model(spec, dtype=dtype, device="cpu", quantization=quantization)  # type: ignore[arg-type]
    return ModelWeights(model, spec, dtype=dtype, quantization=quantization)


def state(name: str, seed: int) -> dict[str, torch.Tensor]:
    return dict(make_model(name, seed).state_dict())


def read(weights: ModelWeights, names: list[str]) -> list[TensorBytes]:
    return msgspec.msgpack.decode(weights.obey(GetWeights(names)), type=list[TensorBytes])


def values_of(tensor: TensorBytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))


def stage(weights: ModelWeights, tensors: dict[str, torch.Tensor], update_id: str = "u") -> None:
    weights.obey(StageWeights(update_id, [tensor_bytes(name, values) for name, values in tensors.items()]))


def everything(weights: ModelWeights, names: list[str]) -> list[bytes]:
    return [tensor.data for tensor in read(weights, names)]


ARCHITECTURES = [*CONFIGS, "odd"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reads_what_was_loaded(name: str, folder: Callable[..., Path]) -> None:
    weights, tensors = load(folder(name)), state(name, 0)
    found = read(weights, list(tensors))
    assert [each.name for each in found] == list(tensors)
    for each in found:
        assert each == tensor_bytes(each.name, tensors[each.name])


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replacing_all_equals_loading(name: str, quantization: str, folder: Callable[..., Path]) -> None:
    weights, fresh = load(folder(name, 0), quantization), load(folder(name, 1), quantization)
    tensors = state(name, 1)
    before = everything(weights, list(tensors))
    stage(weights, tensors)
    assert everything(weights, list(tensors)) == before
    weights.obey(CommitWeights("u"))
    assert everything(weights, list(tensors)) == everything(fresh, list(tensors))
    packed = [module for module in weights._model.modules() if "packed" in vars(module)]
    for ours, theirs in zip(packed, (m for m in fresh._model.modules() if "packed" in vars(m)), strict=True):
        assert torch.equal(ours.packed.weight, theirs.packed.weight)
        assert ours.packed.bias is None or torch.equal(ours.packed.bias, theirs.packed.bias)


def test_replacing_some_leaves_the_others(folder: Callable[..., Path]) -> None:
    weights, old, new = load(folder("llama")), state("llama", 0), state("llama", 1)
    changed = ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
    stage(weights, {name: new[name] for name in changed})
    weights.obey(CommitWeights("u"))
    expected = [tensor_bytes(name, (new if name in changed else old)[name]).data for name in old]
    assert everything(weights, list(old)) == expected


def test_float32_and_the_checkpoint_as_source(folder: Callable[..., Path]) -> None:
    weights, fresh = load(folder("qwen3", 0), dtype=torch.float32), load(folder("qwen3", 1), dtype=torch.float32)
    weights.obey(StageCheckpoint("u", str(folder("qwen3", 1))))
    fingerprint = msgspec.msgpack.decode(weights.obey(CommitWeights("u")))
    names = list(state("qwen3", 0))
    assert everything(weights, names) == everything(fresh, names)
    assert fingerprint == fresh.fingerprint == weights.fingerprint


def test_pieces_may_be_cut_anywhere_but_must_be_whole(folder: Callable[..., Path]) -> None:
    weights, name = load(folder("llama")), "model.layers.0.mlp.down_proj.weight"
    whole = tensor_bytes(name, state("llama", 1)[name])

    def piece(start: int, stop: int) -> TensorBytes:
        return TensorBytes(name, whole.dtype, whole.shape, whole.data[start:stop], start)

    weights.obey(StageWeights("u", [piece(0, 1001)]))
    with pytest.raises(RequestError, match="bytes have not arrived"):
        weights.obey(CommitWeights("u"))
    weights.obey(StageWeights("v", [piece(0, 7), piece(7, 1001)]))
    weights.obey(StageWeights("v", [piece(1001, len(whole.data))]))
    weights.obey(CommitWeights("v"))
    assert read(weights, [name]) == [whole]
    weights.obey(StageWeights("w", [piece(0, 7)]))
    with pytest.raises(RequestError, match="do not continue 7 bytes"):
        weights.obey(StageWeights("w", [piece(8, 20)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "model.layers.9.mlp.up_proj.weight"}, r"no tensor 'model.layers.9.mlp.up_proj.weight'"),
        ({"shape": (96, 32)}, r"up_proj.weight has shape \[96, 32\], the model's has \[96, 64\]"),
        ({"dtype": "int8"}, r"up_proj.weight is of dtype 'int8'"),
        ({"data": b"x" * 99999}, r"99999 bytes from 0 on of bfloat16"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    change: dict[str, object], message: str, folder: Callable[..., Path]
) -> None:
    weights, name = load(folder("llama")), "model.layers.0.mlp.up_proj.weight"
    before = everything(weights, list(state("llama", 0)))
    good = tensor_bytes("model.norm.weight", state("llama", 1)["model.norm.weight"])
    bad = msgspec.structs.replace(tensor_bytes(name, state("llama", 1)[name]), **change)
    with pytest.raises(RequestError, match=message):
        weights.obey(StageWeights("u", [good, bad]))
    with pytest.raises(RequestError, match="nothing is staged"):
        weights.obey(CommitWeights("u"))
    assert everything(weights, list(state("llama", 0))) == before


def test_another_model_cannot_take_its_place(folder: Callable[..., Path], tmp_path: Path) -> None:
    weights = load(folder("llama"))
    for path, message in (
        (folder("qwen3"), "its architecture is Qwen3"),
        (tmp_path / "none", "there is no model"),
        ("0" * 300, "too long"),
        ("a\0", "cannot take"),
    ):
        with pytest.raises(RequestError, match=message):
            weights.obey(StageCheckpoint("u", str(path)))
    with pytest.raises(RequestError, match="nothing is staged"):
        weights.obey(CommitWeights("u"))


def test_a_later_update_takes_the_place_of_one_that_was_not_committed(folder: Callable[..., Path]) -> None:
    weights, new = load(folder("llama")), state("llama", 1)
    stage(weights, {"model.norm.weight": new["model.norm.weight"]}, "first")
    stage(weights, {"lm_head.weight": new["lm_head.weight"]}, "second")
    with pytest.raises(RequestError, match="nothing is staged for update 'first'"):
        weights.obey(CommitWeights("first"))
    weights.obey(DropStagedWeights("first"))
    weights.obey(CommitWeights("second"))
    weights.obey(DropStagedWeights("second"))


def test_fingerprints_tell_values_not_the_way_they_came(folder: Callable[..., Path]) -> None:
    one, other, tensors = load(folder("llama", 0)), load(folder("llama", 2)), state("llama", 1)
    stage(one, tensors)
    for name, values in reversed(tensors.items()):
        stage(other, {name: values})
    assert one.obey(CommitWeights("u")) == other.obey(CommitWeights("u"))
    stage(one, {"model.norm.weight": tensors["model.norm.weight"] + 1})
    one.obey(CommitWeights("u"))
    assert one.fingerprint != other.fingerprint


def test_unknown_names_are_named(folder: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match=r"no tensor 'model\.nothing'"):
        load(folder("llama")).obey(GetWeights(["model.norm.weight", "model.nothing"]))


def test_tensors_of_a_trainer(folder: Callable[..., Path], free_port: int) -> None:
    weights, new = load(folder("llama")), state("llama", 1)
    sent = {name: new[name] for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")}

    def train() -> None:
        group = WeightsGroup("127.0.0.1", free_port, rank=0, world_size=2, name="g", timeout_s=20)
        for values in sent.values():
            group.broadcast(values)

    trainer = threading.Thread(target=train)
    trainer.start()
    weights.obey(JoinWeightsGroup("g", "127.0.0.1", free_port, 1, 2, "gloo", 20.0))
    with pytest.raises(RequestError, match="there already"):
        weights.obey(JoinWeightsGroup("g", "127.0.0.1", free_port, 1, 2, "gloo", 20.0))
    shapes = [tuple(values.shape) for values in sent.values()]
    with pytest.raises(RequestError, match="has shape"):
        weights.obey(ReceiveWeights("u", "g", list(sent), ["bfloat16"] * 2, [(3,), shapes[1]]))
    weights.obey(ReceiveWeights("u", "g", list(sent), ["bfloat16"] * 2, shapes))
    weights.obey(CommitWeights("u"))
    trainer.join()
    assert read(weights, list(sent)) == [tensor_bytes(name, values) for name, values in sent.items()]
    weights.obey(LeaveWeightsGroup("g"))
    with pytest.raises(RequestError, match="no group 'g'"):
        weights.obey(ReceiveWeights("u", "g", [], [], []))


def test_a_trainer_that_does_not_come(folder: Callable[..., Path], free_port: int) -> None:
    weights = load(folder("llama"))
    with pytest.raises(Unavailable, match="did not meet the others"):
        weights.obey(JoinWeightsGroup("g", "127.0.0.1", free_port, 1, 2, "gloo", 0.3))
    with pytest.raises(Unsupported, match="gloo"):
        weights.obey(JoinWeightsGroup("g", "127.0.0.1", free_port, 1, 2, "nccl", 0.3))


def test_the_blocks_of_a_file_are_read_but_not_replaced(demo_model: Path) -> None:
    weights, expanded = load(demo_model, "gguf"), load(demo_model)
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight", "model.norm.weight"]
    for ours, theirs in zip(read(weights, names), read(expanded, names), strict=True):
        assert torch.equal(values_of(ours), values_of(theirs))
    with pytest.raises(Unsupported, match="quantization none or int8"):
        weights.obey(StageWeights("u", read(expanded, names)))
    with pytest.raises(Unsupported, match="quantization none or int8"):
        weights.obey(StageCheckpoint("u", str(demo_model)))


def test_rows_are_read_alone(folder: Callable[..., Path]) -> None:
    weights, name = load(folder("llama")), "model.layers.0.mlp.gate_proj.weight"
    (whole,) = read(weights, [name])
    (some,) = msgspec.msgpack.decode(weights.obey(GetWeights([name], 17, 40)), type=list[TensorBytes])
    assert some.shape == whole.shape and some.start == 17 * 128
    assert some.data == whole.data[some.start : 40 * 128]
