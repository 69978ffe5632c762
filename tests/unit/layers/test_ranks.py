"""Layers dealt to ranks, which are threads here, against the same layers on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from thread_ranks import run_ranks
from tiny_models import StateDictSource

from diptych.kernels.library import kernels, set_num_threads
from diptych.layers.embedding import Embedding
from diptych.layers.linear import RowLinear
from diptych.layers.logits import LogitsHead
from diptych.layers.mlp import GatedMLP
from diptych.layers.shard import Share, even_share
from diptych.layers.weights import WeightSource
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE
from diptych.parallel.mesh import MeshSizes

HIDDEN, VOCAB = 32, 70
WORLDS = pytest.mark.parametrize("size", [2, 3, 4])


@pytest.fixture(autouse=True, params=["reference", "packed"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """float32 in torch, and bfloat16 on the CPU kernels."""
    if request.param == "packed" and kernels() is None:
        pytest.skip("no C++ compiler: there are no kernels")
    set_num_threads(1)  # ranks are threads
    with torch.inference_mode():
        yield torch.float32 if request.param == "reference" else torch.bfloat16
    set_num_threads(torch.get_num_threads())


def over(size: int, work: Callable[[GroupCoordinator], torch.Tensor]) -> list[torch.Tensor]:
    def run(group: GroupCoordinator) -> torch.Tensor:
        with torch.inference_mode():
            return work(group)

    return run_ranks(MeshSizes(tp=size), lambda world: run(world.groups.tensor))


def assert_equal_bits(results: list[torch.Tensor]) -> torch.Tensor:
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)
    return results[0]


@WORLDS
@pytest.mark.parametrize("scale", [None, 3.0])
def test_an_embedding_has_the_very_bits_of_one_rank(size: int, scale: float | None, dtype: torch.dtype) -> None:
    source = StateDictSource({"e.weight": torch.randn(VOCAB, HIDDEN).to(dtype)})
    tokens = torch.tensor([0, 69, 35, 34, 24, 47, 0])

    def rows(group: GroupCoordinator) -> torch.Tensor:
        layer = Embedding(VOCAB, HIDDEN, scale=scale, group=group, dtype=dtype, device="cpu")
        layer.load(source, "e")
        layer.pack()
        return layer(tokens)

    assert torch.equal(assert_equal_bits(over(size, rows)), rows(ALONE))


def head_of(source: WeightSource, group: GroupCoordinator, dtype: torch.dtype, soft_cap: float | None = None):
    head = LogitsHead(VOCAB, HIDDEN, group=group, soft_cap=soft_cap, dtype=dtype, device="cpu")
    head.load(source, "h")
    head.pack()
    return head


@WORLDS
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_all_ranks_have_all_logits(size: int, soft_cap: float | None, dtype: torch.dtype) -> None:
    source = StateDictSource({"h.weight": torch.randn(VOCAB, HIDDEN).to(dtype)})
    hidden = torch.randn(5, HIDDEN).to(dtype)
    logits = assert_equal_bits(over(size, lambda group: head_of(source, group, dtype, soft_cap)(hidden)))
    assert logits.shape == (5, VOCAB) and logits.is_contiguous()
    torch.testing.assert_close(logits, head_of(source, ALONE, dtype, soft_cap)(hidden), rtol=1e-6, atol=1e-6)


@WORLDS
def test_the_likeliest_is_found_without_all_logits_and_of_equals_the_first(size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(VOCAB, HIDDEN)
    weight[[10, 40, 69]] = 4 * torch.ones(HIDDEN)  # of one row the largest, and equal, on several ranks
    source = StateDictSource({"h.weight": weight.to(dtype)})
    hidden = torch.cat((torch.ones(1, HIDDEN), -torch.ones(1, HIDDEN), torch.randn(6, HIDDEN))).to(dtype)
    hidden[7, 0] = torch.nan

    def likeliest(group: GroupCoordinator) -> torch.Tensor:
        indices, values = head_of(source, group, dtype).likeliest(hidden)
        assert indices.dtype == torch.int64 and values.dtype == torch.float32
        return torch.stack((indices.double(), values.double()))

    indices, values = assert_equal_bits(over(size, likeliest))
    logits = head_of(source, ALONE, dtype)(hidden)
    assert indices[:7].tolist() == [10, *logits[1:7].argmax(dim=1).tolist()]
    torch.testing.assert_close(values[:7].float(), logits[:7].amax(dim=1), rtol=1e-6, atol=1e-6)
    assert values[7].isnan()


@WORLDS
def test_a_negative_row_is_not_beaten_by_padding(size: int, dtype: torch.dtype) -> None:
    source = StateDictSource({"h.weight": -torch.rand(VOCAB, HIDDEN).to(dtype) - 1})
    hidden = torch.ones(2, HIDDEN, dtype=dtype)
    expected = head_of(source, ALONE, dtype)(hidden).argmax(dim=1)
    for index in over(size, lambda group: head_of(source, group, dtype).likeliest(hidden)[0]):
        assert index.tolist() == expected.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_a_bias_is_added_once(size: int, dtype: torch.dtype) -> None:
    source = StateDictSource({"r.weight": torch.randn(20, 64).to(dtype), "r.bias": 100 + torch.randn(20).to(dtype)})
    x = torch.randn(3, 64).to(dtype)

    def partial(group: GroupCoordinator) -> torch.Tensor:
        share = Share.whole(64) if group.size == 1 else even_share(64, group, "inputs")
        layer = RowLinear(share, 20, group=group, bias=True, dtype=dtype, device="cpu")
        layer.load(source, "r")
        layer.pack()
        return layer(x[:, share.start : share.stop])

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(assert_equal_bits(over(size, partial)), partial(ALONE), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_are_cut_alike(size: int, activation: str, dtype: torch.dtype) -> None:
    names = {"gate_proj": (96, HIDDEN), "up_proj": (96, HIDDEN), "down_proj": (HIDDEN, 96)}
    tensors = {f"m.{name}.weight": torch.randn(shape).to(dtype) / 8 for name, shape in names.items()}
    tensors |= {f"m.{name}.bias": torch.randn(shape[0]).to(dtype) for name, shape in names.items()}
    x = torch.randn(17, HIDDEN).to(dtype)

    def mlp(group: GroupCoordinator) -> torch.Tensor:
        layer = GatedMLP(HIDDEN, 96, activation=activation, bias=True, group=group, dtype=dtype, device="cpu")
        layer.load(StateDictSource(tensors), "m")
        layer.pack()
        return layer(x)

    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(assert_equal_bits(over(size, mlp)), mlp(ALONE), rtol=tolerance, atol=tolerance)
