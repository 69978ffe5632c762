"""Linear layers against explicit matrix products, and what loading checks."""

from __future__ import annotations

import pytest
import torch

from diptych.errors import ConfigError
from diptych.layers.linear import Linear, MergedLinear


class TensorSource:
    """A WeightSource over tensors in memory."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ConfigError(f"tensor {name} is missing")
        return tuple(self.tensors[name].shape)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.tensors[name].narrow(dim, start, (stop or self.tensors[name].shape[dim]) - start)


def test_linear_multiplies_and_adds_its_bias() -> None:
    weight, bias, x = torch.randn(3, 4), torch.randn(3), torch.randn(5, 4)
    layer = Linear(4, 3, bias=True, dtype=torch.float32, device="cpu")
    layer.load(TensorSource(p__weight=weight, p__bias=bias), "p")
    torch.testing.assert_close(layer(x), x @ weight.T + bias)


def test_merged_linear_stacks_its_parts_in_order() -> None:
    parts = {"a": torch.randn(3, 4), "b": torch.randn(2, 4), "c": torch.randn(1, 4)}
    biases = {name: torch.randn(weight.shape[0]) for name, weight in parts.items()}
    source = TensorSource(
        **{f"p__{name}__weight": weight for name, weight in parts.items()},
        **{f"p__{name}__bias": bias for name, bias in biases.items()},
    )
    layer = MergedLinear(4, {"a": 3, "b": 2, "c": 1}, bias=True, dtype=torch.float32, device="cpu")
    layer.load(source, "p")
    x = torch.randn(5, 4)
    expected = torch.cat([x @ weight.T + biases[name] for name, weight in parts.items()], dim=-1)
    torch.testing.assert_close(layer(x), expected)


def test_loading_converts_the_dtype() -> None:
    layer = Linear(4, 3, dtype=torch.bfloat16, device="cpu")
    weight = torch.randn(3, 4)
    layer.load(TensorSource(p__weight=weight), "p")
    assert torch.equal(layer.weight, weight.bfloat16())


def test_a_wrong_shape_names_tensor_and_both_shapes() -> None:
    layer = MergedLinear(4, {"a": 3, "b": 2}, dtype=torch.float32, device="cpu")
    source = TensorSource(p__a__weight=torch.zeros(3, 4), p__b__weight=torch.zeros(2, 5))
    with pytest.raises(ConfigError, match=r"p\.b\.weight has shape \[2, 5\].*\[2, 4\]"):
        layer.load(source, "p")


def test_meta_layer_and_meta_source_check_without_memory() -> None:
    layer = Linear(1 << 20, 1 << 20, dtype=torch.float32, device="meta")
    layer.load(TensorSource(p__weight=torch.empty(1 << 20, 1 << 20, device="meta")), "p")
    with pytest.raises(ConfigError, match="shape"):
        layer.load(TensorSource(p__weight=torch.empty(1 << 20, 7, device="meta")), "p")
    with pytest.raises(ConfigError, match="missing"):
        layer.load(TensorSource(), "p")
