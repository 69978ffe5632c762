"""Routing against a plain loop over tokens; experts whichever way they are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import ConfigError
from diptych.kernels.library import kernels
from diptych.layers.moe import Choice, Experts, Router
from diptych.layers.routing import Routing

HIDDEN, INNER = 32, 48


class Drawn:
    """A WeightSource that makes up what it is asked for, and remembers it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        return tensor.narrow(dim, start, (tensor.shape[dim] if stop is None else stop) - start)


def expert_source(num_experts: int, seed: int = 0) -> Drawn:
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(num_experts):
        shapes |= {f"e.{expert}.{name}.weight": (INNER, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes[f"e.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    return Drawn(shapes, seed)


def make_experts(num_experts: int, source: Drawn, dtype: torch.dtype = torch.float32) -> Experts:
    experts = Experts(num_experts, (HIDDEN, INNER), activation="silu", dtype=dtype, device="cpu")
    experts.load(source, "e")
    return experts


def choice_of(num_tokens: int, num_experts: int, num_chosen: int, seed: int = 1) -> Choice:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, experts = scores.topk(num_chosen)
    return Choice(experts, weights)


def one_by_one(x: torch.Tensor, choice: Choice, source: Drawn, dtype: torch.dtype) -> torch.Tensor:
    """Every token through its experts, alone, in float32 arithmetic."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for token, (experts, weights) in enumerate(zip(choice.experts.tolist(), choice.weights.tolist(), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up, down = (
                source.read(f"e.{expert}.{name}.weight").to(dtype).float()
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            row = x[token].float()
            out[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    return out


def by_hand(scores: list[float], bias: list[float], routing: Routing) -> dict[int, float]:
    """Experts of one token and their weights, from its scores, as the papers describe it."""
    preference = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = routing.group_size
    groups = [sorted(preference[start : start + size], reverse=True) for start in range(0, len(scores), size)]
    group_scores = [sum(group[: 1 if routing.group_score == "best" else 2]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda group: -group_scores[group])[: routing.num_groups_kept]
    allowed = [expert for expert in range(len(scores)) if expert // size in kept]
    chosen = sorted(allowed, key=lambda expert: -preference[expert])[: routing.num_chosen]
    total = sum(scores[expert] for expert in chosen) if routing.renormalizes else 1.0
    return {expert: scores[expert] / total * routing.scaling for expert in chosen}


ROUTINGS = {
    "softmax": Routing(num_experts=8, num_chosen=3),
    "renormalised": Routing(num_experts=8, num_chosen=3, renormalizes=True),
    "one": Routing(num_experts=8, num_chosen=1, scaling=2.0),
    "best group": Routing(num_experts=8, num_chosen=3, num_groups=4, num_groups_kept=2, is_float32=True, scaling=16.0),
    "sigmoid": Routing(num_experts=8, num_chosen=3, scoring="sigmoid", has_bias=True, renormalizes=True, scaling=2.5),
    "best two": Routing(
        num_experts=12,
        num_chosen=4,
        scoring="sigmoid",
        has_bias=True,
        num_groups=3,
        num_groups_kept=2,
        group_score="best_two",
        renormalizes=True,
        is_float32=True,
    ),
}


@pytest.mark.parametrize("name", ROUTINGS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_choice_and_weights(name: str, seed: int) -> None:
    routing = ROUTINGS[name]
    shapes = {"r.weight": (routing.num_experts, HIDDEN), "r.e_score_correction_bias": (routing.num_experts,)}
    source = Drawn(shapes, seed)
    router = Router(HIDDEN, routing, dtype=torch.float32, device="cpu")
    router.load(source, "r")
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed))
    logits = x.double() @ source.tensors["r.weight"].double().T
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    bias = source.tensors["r.e_score_correction_bias"].tolist() if routing.has_bias else [0.0] * routing.num_experts
    chosen = router(x)
    for token in range(5):
        found = dict(zip(chosen.experts[token].tolist(), chosen.weights[token].tolist(), strict=True))
        assert found == pytest.approx(by_hand(scores[token].tolist(), bias, routing), rel=1e-4)


def test_weights_are_rounded_where_the_model_does() -> None:
    x = torch.randn(9, HIDDEN).bfloat16()
    source = Drawn({"r.weight": (8, HIDDEN)})
    for rounds in (False, True):
        routing = Routing(num_experts=8, num_chosen=2, renormalizes=True, rounds_weights=rounds)
        router = Router(HIDDEN, routing, dtype=torch.bfloat16, device="cpu")
        router.load(source, "r")
        weights = router(x).weights
        assert weights.dtype == torch.float32
        assert torch.equal(weights, weights.bfloat16().float()) == rounds


@pytest.mark.parametrize(
    "changed",
    [
        {"num_groups": 3},
        {"num_groups": 4, "num_groups_kept": 5},
        {"num_chosen": 9},
        {"num_groups": 4, "num_groups_kept": 1, "num_chosen": 3},
        {"num_groups": 8, "num_groups_kept": 8, "group_score": "best_two"},
    ],
)
def test_numbers_that_do_not_fit_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        Routing(**{"num_experts": 8, "num_chosen": 2, **changed})  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(0, 12), num_chosen=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_token_gets_its_own_experts(num_tokens: int, num_chosen: int, seed: int) -> None:
    source = expert_source(5)
    experts, choice = make_experts(5, source), choice_of(num_tokens, 5, num_chosen, seed)
    x = torch.randn(num_tokens, HIDDEN)
    torch.testing.assert_close(experts(x, choice), one_by_one(x, choice, source, torch.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm_is_the_same(dtype: torch.dtype) -> None:
    """What a GPU runs, on the CPU: experts without a token, and all tokens at one expert."""
    experts = make_experts(6, expert_source(6), dtype)
    for chosen in ([0, 0, 2, 5, 5, 5], [3] * 6, [0, 1, 2, 3, 4, 5]):
        ids = torch.tensor(chosen)
        rows = torch.randn(6, HIDDEN).to(dtype)
        counts = torch.bincount(ids, minlength=6)
        grouped = experts._grouped(rows, counts)
        torch.testing.assert_close(grouped, experts._sorted_outputs(rows, counts), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
@pytest.mark.parametrize(("quantization", "tolerance"), [("none", 0.02), ("int8", 0.05), ("gguf", 0.02)])
def test_packed_experts(quantization: str, tolerance: float) -> None:
    source = expert_source(6)
    experts, choice = make_experts(6, source, torch.bfloat16), choice_of(20, 6, 2)
    experts.pack(quantization)  # type: ignore[arg-type]
    x = torch.randn(20, HIDDEN).bfloat16()
    exact = one_by_one(x, choice, source, torch.bfloat16)
    assert (experts(x, choice).float() - exact).abs().max() <= tolerance * exact.abs().max()
    alone = experts(x[7:8], Choice(choice.experts[7:8], choice.weights[7:8]))
    assert torch.equal(alone, experts(x, choice)[7:8]), "the tokens beside it changed a token's result"


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
def test_packed_experts_take_new_weights() -> None:
    experts, other, choice = (
        make_experts(4, expert_source(4), torch.bfloat16),
        expert_source(4, seed=9),
        choice_of(6, 4, 2),
    )
    experts.pack()
    experts.load(other, "e")
    fresh = make_experts(4, other, torch.bfloat16)
    fresh.pack()
    x = torch.randn(6, HIDDEN).bfloat16()
    assert torch.equal(experts(x, choice), fresh(x, choice))
