"""Weights that are replaced while a model is spread over ranks: each takes its own part of what all are sent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from thread_ranks import ThreadWorld, run_ranks
from tiny_models import checkpoint, reference_model

from diptych.config import ModelConfig
from diptych.core.calls import CommitWeights, GetWeights, StageWeights, TensorBytes
from diptych.models.loader import load_model
from diptych.models.named_tensors import tensor_bytes
from diptych.models.spec import inspect_model
from diptych.parallel.mesh import Axis, MeshSizes
from diptych.worker.weights import ModelWeights

CASE = "llama-head-dim-biases-tied"


def load(folder: Path, world: ThreadWorld) -> ModelWeights:
    spec = inspect_model(ModelConfig(model_path=str(folder)))
    model = load_model(spec, dtype=torch.float32, device="cpu", groups=world.groups)
    return ModelWeights(model, spec, dtype=torch.float32, quantization="none", group=world.group(Axis.WORLD))


@pytest.mark.parametrize("sizes", [MeshSizes(tp=2), MeshSizes(tp=4), MeshSizes(pp=2), MeshSizes(tp=2, pp=2)], ids=str)
def test_a_replaced_model_is_the_other_one(sizes: MeshSizes, tmp_path: Path) -> None:
    reference_model(CASE).save_pretrained(tmp_path)
    tensors = {name: values + 1 for name, values in checkpoint(CASE).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # as in the state of a model whose head is tied

    def work(world: ThreadWorld) -> list[bool]:
        weights = load(tmp_path, world)
        before = {name: values.clone() for name, values in weights._model.named_parameters()}
        weights.obey(StageWeights("u", [tensor_bytes(name, values) for name, values in tensors.items()]))
        weights.obey(CommitWeights("u"))
        return [torch.equal(values, before[name] + 1) for name, values in weights._model.named_parameters()]

    results = run_ranks(sizes, work)
    assert all(results) and all(all(found) for found in results)


@pytest.mark.parametrize("sizes", [MeshSizes(tp=4), MeshSizes(tp=2, pp=2)], ids=str)
def test_parts_are_read_as_the_whole(sizes: MeshSizes, tmp_path: Path) -> None:
    reference_model(CASE).save_pretrained(tmp_path)
    tensors = checkpoint(CASE)
    read, *others = run_ranks(sizes, lambda world: load(tmp_path, world).obey(GetWeights(list(tensors))))
    found = msgspec.msgpack.decode(read, type=list[TensorBytes])
    assert [tensor.data for tensor in found] == [tensor_bytes(name, values).data for name, values in tensors.items()]
    assert {msgspec.msgpack.decode(other, type=list[TensorBytes]) == [] for other in others} == {True}
