"""Log-probabilities of the raw model distribution, for output and prompt tokens.

Owns what a TokenLogprobs says: value, rank, the likeliest tokens and the ones asked for by id. Knows nothing of
sampling. r = rows, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from diptych.core.batch import TokenLogprobs
from diptych.core.request import MAX_LOGPROBS, SamplingParams
from diptych.sampling.truncation import top_candidates

_MAX_GROUP_NUMEL = 2**22  # 16 rows of 262,144: bounds the scratch memory of a long prompt chunk


def wants_logprobs(sampling: SamplingParams) -> bool:
    """Whether output tokens of this request carry log-probabilities."""
    return sampling.logprobs is not None or len(sampling.logprob_token_ids) > 0


def prompt_logprobs(
    logits_chunk: torch.Tensor, next_token_ids: list[int], sampling: SamplingParams
) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens, from the logits of the positions before them.

    Args: logits_chunk: float [r, V]. next_token_ids: the token that follows each row, [r].
    Returns: one entry a row, in order; empty if the request asked for none.
    """
    if sampling.prompt_logprobs is None:
        return []
    count = sampling.prompt_logprobs
    tokens = torch.tensor(next_token_ids, dtype=torch.int64, device=logits_chunk.device)
    return _in_groups(logits_chunk, tokens, [count] * len(next_token_ids), [sampling.logprob_token_ids] * len(tokens))


def output_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, samplings: list[SamplingParams]
) -> list[TokenLogprobs]:
    """Log-probabilities of sampled tokens.

    Args: logits: the model's own, float [r, V]. token_ids: int64 [r] on the same device. samplings: one a row.
    """
    counts = [sampling.logprobs or 0 for sampling in samplings]
    return _in_groups(logits, token_ids, counts, [sampling.logprob_token_ids for sampling in samplings])


def _in_groups(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int], extra_ids: list[tuple[int, ...]]
) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    step = max(1, _MAX_GROUP_NUMEL // logits.shape[1])
    for start in range(0, logits.shape[0], step):
        part = slice(start, start + step)
        entries += _token_logprobs(logits[part].float(), token_ids[part], counts[part], extra_ids[part])
    return entries


def _token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int], extra_ids: list[tuple[int, ...]]
) -> list[TokenLogprobs]:
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = _ranks(logits, chosen)
    top_values: list[list[float]] = [[]] * len(counts)
    top_ids: list[list[int]] = [[]] * len(counts)
    if max(counts) > 0:
        values, ids = top_candidates(logits, np.arange(len(counts)), MAX_LOGPROBS)
        widest = min(max(counts), ids.shape[1])
        top_values, top_ids = (values[:, :widest] - normaliser).tolist(), ids[:, :widest].tolist()
    rows = zip(token_ids.tolist(), (chosen - normaliser)[:, 0].tolist(), ranks, strict=True)
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top=list(zip(top_ids[row][: counts[row]], top_values[row][: counts[row]], strict=True)),
            extra=_extra(logits[row], normaliser[row], extra_ids[row]),
        )
        for row, (token_id, logprob, rank) in enumerate(rows)
    ]


def _ranks(logits: torch.Tensor, chosen: torch.Tensor) -> list[int]:
    if logits.device.type == "cpu":  # numpy counts thirty times as fast
        return [
            int(np.count_nonzero(row > value)) + 1 for row, value in zip(logits.numpy(), chosen.numpy(), strict=True)
        ]
    ranks: list[int] = (torch.count_nonzero(logits > chosen, dim=1) + 1).tolist()
    return ranks


def _extra(logits: torch.Tensor, normaliser: torch.Tensor, ids: tuple[int, ...]) -> list[tuple[int, float]]:
    if not ids:
        return []
    values = logits[torch.tensor(ids, device=logits.device)] - normaliser
    return list(zip(ids, values.tolist(), strict=True))
