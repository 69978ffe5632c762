from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diptych.sampling.truncation import SamplingRows, TokenSampler, argmax_rows, top_candidates

CPU = torch.device("cpu")


def rows_of(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    noise: NDArray[np.float64] | None = None,
) -> SamplingRows:
    return SamplingRows(
        rows=np.arange(count),
        temperature=np.full(count, temperature),
        top_k=np.full(count, top_k),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p),
        noise=np.full(count, 0.5) if noise is None else noise,
    )


def kept_probabilities(
    logits: NDArray[np.float64], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """The exact distribution, the slow and obvious way: sort everything."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(logits)), -logits))
    keep = weights >= min_p
    if top_k > 0:
        keep &= logits >= logits[order[min(top_k, len(order)) - 1]]
    weights = weights * keep
    ends = np.cumsum(weights[order])
    if top_p < 1.0:
        num_kept = int((ends < top_p * ends[-1]).sum()) + 1
        weights[order[num_kept:]] = 0.0
    return np.asarray(weights / weights.sum())


CASES = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.5, "top_k": 10, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.7, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.9, "min_p": 0.0},
    {"temperature": 3.0, "top_k": 0, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("vocab_size", [50, 1000, 5003])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_inverse_cdf_follows_the_exact_distribution(case: dict[str, float], vocab_size: int) -> None:
    """Noise on a fine regular grid gives counts within one of the exact ones: no luck involved."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(vocab_size) * 2.5
    exact = kept_probabilities(logits.double().numpy(), **case)  # type: ignore[arg-type]
    num_draws = 4096
    noise = (np.arange(num_draws) + 0.5) / num_draws
    sampler = TokenSampler(vocab_size, device=CPU)
    tokens, valid = sampler.draw(logits.expand(num_draws, -1), rows_of(num_draws, noise=noise, **case))  # type: ignore[arg-type]
    assert bool(valid.all())
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    assert np.abs(counts - exact * num_draws).max() <= 1.01
    assert not counts[exact == 0].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_draws_pass_a_chi_square_test(case: dict[str, float]) -> None:
    torch.manual_seed(5)
    logits = torch.randn(200) * 2
    exact = kept_probabilities(logits.double().numpy(), **case)  # type: ignore[arg-type]
    num_draws = 8192
    noise = np.random.default_rng(11).random(num_draws)
    sampler = TokenSampler(200, device=CPU)
    tokens, _ = sampler.draw(logits.expand(num_draws, -1), rows_of(num_draws, noise=noise, **case))  # type: ignore[arg-type]
    counts = np.bincount(tokens.numpy(), minlength=200)
    often = exact * num_draws >= 5
    expected = np.append(exact[often] * num_draws, exact[~often].sum() * num_draws)
    observed = np.append(counts[often], counts[~often].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    freedom = len(expected) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 33, 130, 700, 3000]),
    st.sampled_from([0, 1, 5, 100, 200, 10_000]),
    st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.001, 0.3]),
    st.booleans(),
)
def test_a_token_outside_the_exact_kept_set_is_never_drawn(
    seed: int, vocab_size: int, top_k: int, top_p: float, min_p: float, has_ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocab_size, generator=generator) * 3
    if has_ties:
        logits = logits.round()
    noise = np.random.default_rng(seed).random(8)
    noise[:2] = 0.0, 1.0 - 2.0**-53
    case = {"temperature": 0.7, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens, valid = TokenSampler(vocab_size, device=CPU).draw(logits, rows_of(8, noise=noise, **case))  # type: ignore[arg-type]
    assert bool(valid.all())
    # An edge of the kept set may fall differently in single precision: a little slack on the shares, none without them.
    loose = case | {"top_p": min(1.0, top_p * (1 + 1e-4)), "min_p": min_p * (1 - 1e-4)}
    for row in range(8):
        assert kept_probabilities(logits[row].double().numpy(), **loose)[tokens[row]] > 0  # type: ignore[arg-type]


def test_equal_logits_keep_the_lowest_ids_under_top_p_and_all_of_them_under_top_k() -> None:
    logits = torch.zeros(1000, 1000)
    noise = (np.arange(1000) + 0.5) / 1000
    sampler = TokenSampler(1000, device=CPU)
    tokens, _ = sampler.draw(logits, rows_of(1000, top_p=0.5, noise=noise))
    assert set(tokens.tolist()) == set(range(500))
    tokens, _ = sampler.draw(logits, rows_of(1000, top_k=3, noise=noise))
    assert set(tokens.tolist()) == set(range(1000))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [{}, {"top_k": 5}, {"top_k": 500}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_that_is_not_finite_is_marked_and_the_others_are_drawn(bad: float, case: dict[str, float]) -> None:
    logits = torch.randn(3, 2000)
    logits[1, 1234] = bad
    tokens, valid = TokenSampler(2000, device=CPU).draw(logits, rows_of(3, **case))  # type: ignore[arg-type]
    assert valid.tolist() == [True, False, True]
    assert tokens[1] == 0


@pytest.mark.parametrize("case", [{}, {"top_k": 5}, {"top_k": 500}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_masked_tokens_are_never_drawn_and_a_fully_masked_row_is_marked(case: dict[str, float]) -> None:
    logits = torch.full((2, 2000), -torch.inf)
    logits[0, 1999] = -50.0
    tokens, valid = TokenSampler(2000, device=CPU).draw(logits, rows_of(2, **case))  # type: ignore[arg-type]
    assert valid.tolist() == [True, False]
    assert tokens[0] == 1999


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[5.0, 1e4, 3.0], [-1e4, -2e4, -3e4]])
    tokens, valid = TokenSampler(3, device=CPU).draw(logits, rows_of(2, temperature=1e-30))
    assert valid.all()
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(case: dict[str, float]) -> None:
    vocab_size, count = 20_011, 11
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    noise = np.random.default_rng(2).random(count)
    sampler = TokenSampler(vocab_size, device=CPU)
    together, _ = sampler.draw(logits, rows_of(count, noise=noise, **case))  # type: ignore[arg-type]
    for row in range(count):
        alone, _ = sampler.draw(logits[row : row + 1], rows_of(1, noise=noise[row : row + 1], **case))  # type: ignore[arg-type]
        assert alone[0] == together[row]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([10, 129, 4100, 9001]), st.sampled_from([1, 20, 128]), st.booleans())
def test_candidates_are_the_likeliest_tokens_in_order(seed: int, vocab_size: int, count: int, has_ties: bool) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed))
    if has_ties:
        logits = (logits * 8).round()
    values, ids = top_candidates(logits, np.array([2, 0]), count)
    expected = torch.sort(logits[[2, 0]], dim=1, descending=True, stable=True)
    width = min(count, vocab_size)
    assert torch.equal(values, expected.values[:, :width])
    for place, row in enumerate((2, 0)):
        assert torch.equal(logits[row][ids[place]], values[place])
        sure = values[place] > values[place, -1]
        assert torch.equal(ids[place][sure], expected.indices[place, :width][sure])


def test_argmax_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    assert argmax_rows(logits).tolist() == [1, 0]
