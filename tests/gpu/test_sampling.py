"""Argmax and truncated draws against a float64 reference that sorts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from diptych.kernels.cuda.sampling import argmax_rows, new_workspace, sample_rows, store_last

DTYPES = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float32]
SIZES = [50, 9000, pytest.param(128_256, marks=pytest.mark.gpu), pytest.param(262_144, marks=pytest.mark.gpu)]
# temperature, top_k, top_p, min_p
CUTS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
    (0.7, 1, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 200, 1.0, 0.0),
    (1.0, 10**6, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.6, 0, 0.999, 0.0),
    (1.0, 0, 0.01, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 40, 0.9, 0.0),
    (1.0, 0, 0.8, 0.05),
    (2.0, 60, 0.95, 0.02),
    (1e-9, 0, 0.9, 0.0),
]
# The float32 sums of the kernel differ from the reference's by no more than this share of the mass.
TOLERANCE = 1e-5


def kept_weights(logits: NDArray, temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray[np.float64]:
    """Weights of one row's tokens, 0 for those that are cut: the definition in sampling.truncation, by sorting."""
    logits = logits.astype(np.float64)
    if temperature <= 0.0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / max(temperature, 1e-6))
    weights[weights < min_p] = 0.0
    if 0 < top_k < len(logits):
        weights[logits < np.sort(logits)[-top_k]] = 0.0
    if top_p < 1.0:
        order = np.argsort(-logits, kind="stable")
        ends = np.cumsum(weights[order])
        weights[order[ends - weights[order] >= top_p * ends[-1]]] = 0.0
    return weights


def sample(logits: torch.Tensor, cuts: list[tuple[float, int, float, float]], noise: NDArray) -> list[int]:
    """Tokens of rows with these numbers."""
    device = logits.device
    temperature, top_k, top_p, min_p = zip(*cuts, strict=True)
    out = torch.full((len(cuts),), -7, device=device)
    sample_rows(
        logits,
        temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
        noise=torch.from_numpy(noise).to(device),
        out=out,
        workspace=new_workspace(len(cuts), logits.shape[1], device=device),
    )
    return out.tolist()


def assert_drawn(token: int, noise: float, weights: NDArray[np.float64]) -> None:
    """The token is kept, and the noise falls into its part of the CDF."""
    ends = np.cumsum(weights) / weights.sum()
    assert weights[token] > 0.0
    assert ends[token] - weights[token] / weights.sum() - TOLERANCE <= noise <= ends[token] + TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, pytest.param(256, marks=pytest.mark.gpu)])
def test_argmax(device: torch.device, dtype: torch.dtype, vocab_size: int, num_rows: int) -> None:
    logits = torch.randn(num_rows, vocab_size + 16, device=device).to(dtype)[:, :vocab_size]
    logits[0, torch.tensor([7, 33, vocab_size - 1])] = logits.max()  # the lowest id among equals
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    argmax_rows(logits, out=out, workspace=new_workspace(num_rows, vocab_size, device=device))
    assert out.tolist() == logits.float().cpu().numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_unsound_rows_have_no_token(device: torch.device, bad: float) -> None:
    logits = torch.randn(3, 5000, device=device)
    logits[1] = bad if bad == -float("inf") else logits[1].index_fill(0, torch.tensor([4321], device=device), bad)
    workspace = new_workspace(3, 5000, device=device)
    out = torch.empty(3, dtype=torch.int64, device=device)
    argmax_rows(logits, out=out, workspace=workspace)
    best = logits.argmax(dim=1).tolist()
    assert out.tolist() == [best[0], -1, best[2]]
    for cut in [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1)]:
        tokens = sample(logits, [cut] * 3, np.array([0.1, 0.5, 0.9]))
        assert [token >= 0 for token in tokens] == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 0.3, pytest.param(3.0, marks=pytest.mark.gpu)])
def test_draws(device: torch.device, dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    generator = np.random.default_rng(vocab_size)
    logits = (spread * torch.randn(len(CUTS), vocab_size + 16, device=device) - 2.0).to(dtype)[:, :vocab_size]
    logits[:, ::5] = -float("inf")  # as masks leave them
    host = logits.float().cpu().numpy()
    noise = generator.random(len(CUTS))
    for row, token in enumerate(sample(logits, CUTS, noise)):
        assert_drawn(token, noise[row], kept_weights(host[row], *CUTS[row]))


@pytest.mark.parametrize("noise", [0.0, 1.0 - 2.0**-53])
def test_extreme_noise_draws_the_first_or_the_last(device: torch.device, noise: float) -> None:
    logits = torch.randn(len(CUTS), 1000, device=device)
    for row, token in enumerate(sample(logits, CUTS, np.full(len(CUTS), noise))):
        kept = np.flatnonzero(kept_weights(logits[row].cpu().numpy(), *CUTS[row]))
        assert token == kept[0 if noise == 0.0 else -1]


@pytest.mark.parametrize("cut", [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.35, 0.0), (1.0, 6, 0.5, 0.0), (0.5, 0, 0.62, 0.01)])
def test_ties(device: torch.device, cut: tuple[float, int, float, float]) -> None:
    """Few distinct logits, so that every cut falls among equals."""
    logits = torch.randint(-2, 3, (1, 700), generator=torch.Generator().manual_seed(3)).float().to(device)
    weights = kept_weights(logits[0].cpu().numpy(), *cut)
    noise = (np.arange(12) + 0.5) / 12
    for token, number in zip(sample(logits.expand(12, -1), [cut] * 12, noise), noise, strict=True):
        assert_drawn(token, number, weights)


def test_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    logits = 2 * torch.randn(len(CUTS), 5000, device=device)
    noise = np.random.default_rng(1).random(len(CUTS))
    together = sample(logits, CUTS, noise)
    alone = [sample(logits[row : row + 1], CUTS[row : row + 1], noise[row : row + 1])[0] for row in range(len(CUTS))]
    assert together == alone


@pytest.mark.gpu
def test_frequencies(device: torch.device) -> None:
    """Chi-square of 40,000 draws against the truncated distribution."""
    logits = torch.randn(1, 1000, device=device).expand(40_000, -1)
    cut = (1.0, 30, 0.9, 0.0)
    weights = kept_weights(logits[0].cpu().numpy(), *cut)
    expected = 40_000 * weights / weights.sum()
    tokens = sample(logits, [cut] * 40_000, np.random.default_rng(0).random(40_000))
    found = np.bincount(tokens, minlength=1000)
    is_kept = weights > 0.0
    assert not found[~is_kept].any()
    statistic = ((found - expected)[is_kept] ** 2 / expected[is_kept]).sum()
    degrees = is_kept.sum() - 1
    assert statistic < degrees + 5.0 * np.sqrt(2.0 * degrees)


def test_last_tokens_are_stored(device: torch.device) -> None:
    last_tokens = torch.arange(100, 105, device=device)
    tokens = torch.tensor([7, -1, 8, 9, 6], device=device)
    slots = torch.tensor([3, 2, 0, -1, 5], device=device)
    store_last(tokens, slots, last_tokens=last_tokens)
    assert last_tokens.tolist() == [8, 101, 102, 7, 104]
