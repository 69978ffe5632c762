"""From adjusted logits to a token: argmax, inverse CDF over the whole vocabulary, and over a truncated distribution.

Owns the choice itself. Knows nothing of slots, requests or grammars: it sees logits, a few numbers per row and one
uniform number per row. The vocabulary (262,144 tokens for Gemma) is never sorted.

Every reduction whose rounding could depend on the batch is done by a kernel that works row by row, so that a row's
token does not depend on the other rows. R = rows of the batch, r = rows that are sampled, V = vocabulary, C = chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.kernels import reduce as kernels

MIN_TEMPERATURE = 1e-6  # below it, logits divided by it could overflow; the result is greedy long before

NUM_CANDIDATES = 128  # a truncated distribution is mostly smaller, and then nothing else is looked at
_CHUNK_LEN = 32  # tokens whose maximum stands for them in the search for candidates
_SUM_LEN = 512  # tokens whose probabilities are summed at once in the inverse CDF
_ALMOST_ONE = 1.0 - 2.0**-52
_SCRATCH_NUMEL = {"cpu": 2**20}  # four rows of 262,144 stay in the cache of a core or two
_SCRATCH_NUMEL_DEFAULT = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Which rows of a batch are sampled, and how; arrays are parallel, one entry a sampled row.

    rows: int64, indices into the batch. temperature: float64, above 0. top_k: int64, 0 keeps all. top_p, min_p:
    float64. noise: float64, uniform in [0, 1).
    """

    rows: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    noise: NDArray[np.float64]

    def select(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> SamplingRows:
        """The part of these rows that `index` picks."""
        return SamplingRows(
            rows=self.rows[index],
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            noise=self.noise[index],
        )


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Likeliest token of every row, the lowest id among equals; a row with a NaN gives the NaN's index.

    Args: logits: float32 [R, V]. Returns: int64 [R] on the same device.
    """
    if logits.device.type == "cpu":  # torch's argmax is not vectorised: 24 ms for [32, 262144], numpy's 1.2
        found = kernels.argmax_rows(logits)
        if found is not None:
            return found
        return torch.from_numpy(np.asarray(logits.numpy().argmax(axis=1), dtype=np.int64))
    return torch.argmax(logits, dim=1)


def top_candidates(logits: torch.Tensor, rows: NDArray[np.int64], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of some rows, best first, the lower id first among equals.

    Which of the tokens that equal the last one are listed is arbitrary (but fixed), as in torch.topk.

    Args: logits: float32 [R, V]. rows: int64 [r]. count: at least 1.
    Returns: values float32 and token ids int64, both [r, min(count, V)].
    """
    vocab_size = logits.shape[1]
    index = torch.from_numpy(rows).to(logits.device)
    num_chunks = vocab_size // _CHUNK_LEN
    if count >= vocab_size:
        values, ids = torch.sort(logits[index], dim=1, descending=True, stable=True)
        return values, ids
    if count >= num_chunks:
        values, ids = torch.topk(logits[index], count, dim=1)
        return _in_order(values, ids)
    # A chunk that holds one of the `count` likeliest tokens is itself among the `count` best chunks by maximum.
    chunk_ids = torch.topk(_chunk_maxima(logits, rows, num_chunks), count, dim=1).indices  # [r, count]
    inside = torch.arange(_CHUNK_LEN, device=logits.device)
    ids = (chunk_ids[:, :, None] * _CHUNK_LEN + inside).flatten(1)  # [r, count * chunk]
    rest = torch.arange(num_chunks * _CHUNK_LEN, vocab_size, device=logits.device).expand(len(rows), -1)
    ids = torch.cat([ids, rest], dim=1)
    values, positions = torch.topk(logits[index[:, None], ids], count, dim=1)
    return _in_order(values, ids.gather(1, positions))


def _chunk_maxima(logits: torch.Tensor, rows: NDArray[np.int64], num_chunks: int) -> torch.Tensor:
    maxima = torch.empty(len(rows), num_chunks, device=logits.device)
    for place, row in enumerate(rows.tolist()):  # row by row: selecting the rows first would copy the whole vocabulary
        torch.amax(logits[row, : num_chunks * _CHUNK_LEN].view(num_chunks, _CHUNK_LEN), dim=1, out=maxima[place])
    return maxima


def _in_order(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = torch.sort(ids, dim=1)
    values, order = torch.sort(values.gather(1, order), dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


class TokenSampler:
    """Draws tokens by inverse CDF. Owns the scratch memory that the probabilities of a few rows pass through."""

    def __init__(self, vocab_size: int, *, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_chunks = -(-vocab_size // _SUM_LEN)
        padded = self._num_chunks * _SUM_LEN
        numel = _SCRATCH_NUMEL.get(device.type, _SCRATCH_NUMEL_DEFAULT)
        self._group_len = max(2, numel // padded)
        self._scratch_shape = (self._group_len, padded)
        self._device = device
        self._scaled: torch.Tensor | None = None  # allocated by the first request that is not greedy
        self._probabilities: torch.Tensor | None = None

    def draw(self, logits: torch.Tensor, sampling: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per sampled row.

        Args: logits: float32 [R, V], not modified.
        Returns: token ids int64 [r], and bool [r]: False where the row has a NaN, a +inf or no token left.
        """
        tokens = torch.zeros(len(sampling.rows), dtype=torch.int64, device=logits.device)
        valid = torch.zeros(len(sampling.rows), dtype=torch.bool, device=logits.device)
        sampling = replace(sampling, top_k=np.where(sampling.top_k >= self._vocab_size, 0, sampling.top_k))
        is_truncated = (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
        for index, draw in ((~is_truncated, self._draw_from_all), (is_truncated, self._draw_truncated)):
            if index.any():
                places = torch.from_numpy(np.flatnonzero(index)).to(logits.device)
                tokens[places], valid[places] = draw(logits, sampling.select(index))
        return tokens, valid

    def _softmax_groups(self, logits: torch.Tensor, sampling: SamplingRows) -> Iterator[tuple[slice, torch.Tensor]]:
        """Probabilities at each row's temperature, a few rows at a time: [group, padded V], soon overwritten."""
        if self._scaled is None or self._probabilities is None:
            self._scaled = torch.full(self._scratch_shape, -torch.inf, device=self._device)
            self._probabilities = torch.empty(self._scratch_shape, device=self._device)
        temperatures = np.maximum(sampling.temperature, MIN_TEMPERATURE).tolist()
        rows = sampling.rows.tolist()
        for start in range(0, len(rows), self._group_len):
            group = rows[start : start + self._group_len]
            for place, row in enumerate(group):
                torch.div(logits[row], temperatures[start + place], out=self._scaled[place, : self._vocab_size])
            probabilities = self._probabilities[: len(group)]
            torch.softmax(self._scaled[: len(group)], dim=1, out=probabilities)  # works row by row, unlike exp and sum
            yield slice(start, start + len(group)), probabilities

    def _draw_from_all(self, logits: torch.Tensor, sampling: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse CDF in vocabulary order: first the chunk of tokens, then the token inside it."""
        sums = torch.empty(len(sampling.rows), self._num_chunks, device=logits.device)
        for group, probabilities in self._softmax_groups(logits, sampling):
            torch.sum(probabilities.view(-1, self._num_chunks, _SUM_LEN), dim=2, out=sums[group])
        noise = torch.from_numpy(np.minimum(sampling.noise, _ALMOST_ONE)).to(logits.device)
        chunk_ends = torch.cumsum(sums, dim=1, dtype=torch.float64)
        target = noise * chunk_ends[:, -1]
        chunk = _first_above(chunk_ends, target)
        chunk_sum = sums.gather(1, chunk).double()
        fraction = ((target[:, None] - (chunk_ends.gather(1, chunk) - chunk_sum)) / chunk_sum).clamp(0.0, _ALMOST_ONE)
        ids = chunk * _SUM_LEN + torch.arange(_SUM_LEN, device=logits.device)  # [r, chunk]
        rows = torch.from_numpy(sampling.rows).to(logits.device)
        inside = logits[rows[:, None], ids.clamp(max=self._vocab_size - 1)].double()
        inside.masked_fill_(ids >= self._vocab_size, -torch.inf)
        temperature = torch.from_numpy(np.maximum(sampling.temperature, MIN_TEMPERATURE)).to(logits.device)[:, None]
        # Only the proportions inside the chunk matter, so they are computed anew, in double precision.
        weights = torch.exp((inside - inside.amax(dim=1, keepdim=True)) / temperature)
        ends = torch.cumsum(weights, dim=1)
        token = ids.gather(1, _first_above(ends, fraction[:, 0] * ends[:, -1]))[:, 0]
        valid = torch.isfinite(chunk_ends[:, -1]) & torch.isfinite(ends[:, -1])
        return torch.where(valid, token, 0), valid

    def _draw_truncated(self, logits: torch.Tensor, sampling: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse CDF over the kept tokens: among a few candidates if they are certain to hold them, else among all."""
        tokens = torch.zeros(len(sampling.rows), dtype=torch.int64, device=logits.device)
        valid = torch.zeros(len(sampling.rows), dtype=torch.bool, device=logits.device)
        is_complete = np.zeros(len(sampling.rows), dtype=np.bool_)
        few = np.flatnonzero(sampling.top_k < NUM_CANDIDATES)
        if len(few):
            part = sampling.select(few)
            values, ids = top_candidates(logits, part.rows, NUM_CANDIDATES)
            places = torch.from_numpy(few).to(logits.device)
            chosen, is_finite, is_complete[few] = _draw_from_candidates(
                values, ids, part, self._mass_of_all(logits, part)
            )
            tokens[places], valid[places] = chosen, is_finite
            if values.shape[1] == self._vocab_size:
                is_complete[few] = True
        for place in np.flatnonzero(~is_complete).tolist():
            token = _draw_from_histogram(logits[sampling.rows[place]].cpu().numpy(), sampling, place)
            tokens[place], valid[place] = max(token, 0), token >= 0
        return tokens, valid

    def _mass_of_all(self, logits: torch.Tensor, sampling: SamplingRows) -> NDArray[np.float64]:
        """Sum over the vocabulary of p / max p, for rows whose top_p counts against all of it; 1 for the others."""
        mass = np.ones(len(sampling.rows))
        index = np.flatnonzero((sampling.top_p < 1.0) & (sampling.min_p <= 0.0) & (sampling.top_k <= 0))
        for group, probabilities in self._softmax_groups(logits, sampling.select(index)):
            mass[index[group]] = 1.0 / probabilities.amax(dim=1).double().cpu().numpy()
        return mass


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index [r, 1] of the first entry of each ascending row [r, n] that is above the row's target [r]."""
    return (ends <= target[:, None]).sum(dim=1, keepdim=True).clamp(max=ends.shape[1] - 1)


def _draw_from_candidates(
    values: torch.Tensor, ids: torch.Tensor, sampling: SamplingRows, mass: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.bool_]]:
    """Truncate the sorted candidates [r, k] by min_p, top_k and top_p, in this order, and draw one.

    Returns: token ids [r]; bool [r], whether the row is sound; and bool [r] on the host, whether every kept token, and
    all that equal the last one, were surely among the candidates (else the draw is void).
    """
    device, count = values.device, values.shape[1]

    def column(array: NDArray[np.float64] | NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)[:, None]

    best = values[:, :1].double()
    weights = torch.exp((values.double() - best) / column(np.maximum(sampling.temperature, MIN_TEMPERATURE)))
    # Tokens that equal the k-th one are kept too: which of them came first would be arbitrary.
    top_k = np.where(sampling.top_k > 0, np.minimum(sampling.top_k, count), count)
    keep = (values >= values.gather(1, column(top_k - 1))) & (weights >= column(sampling.min_p))
    needs_more = keep[:, -1]  # the last candidate is kept, so tokens beyond it might be as well
    is_mass_known = column(((sampling.top_k <= 0) & (sampling.min_p <= 0.0)).astype(np.int64))[:, 0] > 0
    weights = weights * keep
    ends = torch.cumsum(weights, dim=1)
    limit = torch.where(is_mass_known, column(mass)[:, 0], ends[:, -1]) * column(sampling.top_p)[:, 0]
    limit = torch.where(column(sampling.top_p)[:, 0] >= 1.0, torch.inf, limit)
    keep = keep & ((ends - weights) < limit[:, None])  # not in place: needs_more is a view of the set before top_p
    num_kept = keep.sum(dim=1, keepdim=True)
    last_kept = values.gather(1, (num_kept - 1).clamp(min=0))
    is_complete = torch.where(is_mass_known, last_kept[:, 0] > values[:, -1], ~needs_more)
    total = ends.gather(1, (num_kept - 1).clamp(min=0))[:, 0]
    noise = torch.from_numpy(np.minimum(sampling.noise, _ALMOST_ONE)).to(device)
    place = torch.minimum(_first_above(ends, noise * total), (num_kept - 1).clamp(min=0))
    is_finite = torch.isfinite(best[:, 0])
    tokens = torch.where(is_finite, ids.gather(1, place)[:, 0], 0)
    return tokens, is_finite, (is_complete | ~is_finite).cpu().numpy()


def _draw_from_histogram(logits: NDArray[np.float32], sampling: SamplingRows, place: int) -> int:
    """Truncate and draw over the whole vocabulary on the host, for one row; -1 if the row is unsound.

    The top_p cut is found without sorting: a histogram by the upper half of the weights' bits, which order them as
    their values do, shows in which bin the cut falls, and only that bin is sorted.
    """
    best = logits.max()
    if not np.isfinite(best):
        return -1
    weights = np.exp((logits - best) * np.float32(1.0 / max(sampling.temperature[place], MIN_TEMPERATURE)))
    weights[weights < sampling.min_p[place]] = 0.0
    top_k = int(sampling.top_k[place])
    if top_k > 0:
        weights[logits < np.partition(logits, -top_k)[-top_k]] = 0.0
    if sampling.top_p[place] < 1.0:
        _cut_top_p(weights, float(sampling.top_p[place]))
    ends = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(ends, min(sampling.noise[place], _ALMOST_ONE) * ends[-1], side="right"))


def _cut_top_p(weights: NDArray[np.float32], top_p: float) -> None:
    """Zero all but the fewest largest weights that reach a share of `top_p`; among equals the lower ids stay."""
    bins = weights.view(np.uint32) >> 16
    mass = np.bincount(bins, weights=weights)
    from_above = np.cumsum(mass[::-1])[::-1]  # mass of a bin and those above it
    limit = top_p * from_above[0]
    cut_bin = int(np.flatnonzero(from_above >= limit)[-1])
    above = from_above[cut_bin] - mass[cut_bin]
    inside = np.flatnonzero(bins == cut_bin)
    order = np.argsort(-weights[inside], kind="stable")
    ends = above + np.cumsum(weights[inside][order], dtype=np.float64)
    num_kept = int(np.searchsorted(ends, limit, side="left")) + 1
    weights[bins < cut_bin] = 0.0
    weights[inside[order[num_kept:]]] = 0.0
