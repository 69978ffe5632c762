"""RMS norms against the formula, in both orders of rounding."""

from __future__ import annotations

import pytest
import torch

from diptych.layers.norm import QueryKeyNorm, RMSNorm, rms_normalize
from diptych.layers.weights import WeightSource


def normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


class Weights(WeightSource):
    """Serves vectors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.tensors[name]


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 2, 16)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_float32_matches_the_formula(shape: tuple[int, ...], eps: float) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    expected = normalized(x, eps) * weight.double()
    torch.testing.assert_close(rms_normalize(x, weight, eps).double(), expected, rtol=1e-5, atol=1e-6)


def test_the_input_is_left_alone() -> None:
    x = torch.randn(4, 8)
    before = x.clone()
    rms_normalize(x, torch.ones(8), 1e-6)
    assert torch.equal(x, before)


def test_bfloat16_weight_multiplies_after_rounding_and_float32_weight_before() -> None:
    x = torch.randn(64, 128).bfloat16()
    weight = torch.randn(128).bfloat16()
    exact = normalized(x, 1e-6)
    late = exact.bfloat16() * weight
    early = (exact * weight.double()).bfloat16()
    assert not torch.equal(late, early)
    assert (rms_normalize(x, weight, 1e-6) != late).float().mean() < 1e-3
    assert (rms_normalize(x, weight.float(), 1e-6) != early).float().mean() < 1e-3


def test_unit_offset_adds_one_to_the_checkpoint_weight_in_float32() -> None:
    weight = torch.randn(16).bfloat16() * 1e-3
    norm = RMSNorm(16, 1e-6, unit_offset=True, dtype=torch.bfloat16, device="cpu")
    norm.load(Weights({"n.weight": weight}), "n")
    assert torch.equal(norm.weight, 1 + weight.float())
    norm.load(Weights({"n.weight": weight}), "n")
    assert torch.equal(norm.weight, 1 + weight.float()), "loading twice must not add twice"


@pytest.mark.parametrize("unit_offset", [False, True])
def test_query_key_norm_equals_a_norm_for_each(unit_offset: bool) -> None:
    source = Weights({"p.q_norm.weight": torch.randn(8), "p.k_norm.weight": torch.randn(8)})
    both = QueryKeyNorm(
        8, 1e-6, num_heads=3, num_kv_heads=2, unit_offset=unit_offset, dtype=torch.float32, device="cpu"
    )
    both.load(source, "p")
    heads = torch.randn(4, 5, 8)
    for name, part in (("q_norm", slice(0, 3)), ("k_norm", slice(3, 5))):
        norm = RMSNorm(8, 1e-6, unit_offset=unit_offset, dtype=torch.float32, device="cpu")
        norm.load(source, f"p.{name}")
        torch.testing.assert_close(both(heads)[:, part], norm(heads[:, part]))
