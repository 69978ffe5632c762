"""Which guesses stand: the model's own next tokens are drawn one after the other for as long as they are what was
guessed.

A token is drawn exactly as it would have been without guesses: from the model's distribution at its position, adjusted
by all tokens before it, with the noise of (seed, position). So the output is the same whatever was guessed. For a guess
that is certain this is rejection sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318): x drawn from p is the guess with p(guess), and else has p's distribution among the
others. And since sampling state moves with the drawn tokens only, there is nothing to take back: no count of a penalty,
no step of a grammar. Worker's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from diptych.core.batch import TokenLogprobs
from diptych.sampling.sampler import SampledRows

Choose = Callable[[torch.Tensor, list[int]], SampledRows]
"""Draws one token for each of some rows of logits: int64 indices [r], and the slots that they belong to."""


@dataclass(slots=True)
class Verified:
    """What a row yields: its tokens, their logprobs if it asks for them, and why it cannot go on, if it cannot."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


def verify(
    choose: Choose, slots: Sequence[int], drafts: Sequence[list[int]], take: Callable[[int, int], bool]
) -> list[Verified]:
    """Draw the tokens of rows whose logits lie one after the other, one for each draft and one more.

    Args: choose: draws, and moves the sampling state of a slot by a token. slots, drafts: parallel. take: told of every
    token, (slot, token id); says whether it ends its sequence.
    Returns: one to len(drafts) + 1 tokens a row, of which all but the last are drafts; none with an error.
    """
    firsts = [0]
    for guesses in drafts[:-1]:
        firsts.append(firsts[-1] + 1 + len(guesses))
    results = [Verified() for _ in slots]
    going = list(range(len(slots)))
    place = 0
    while going:
        sampled = choose(torch.tensor([firsts[row] + place for row in going]), [slots[row] for row in going])
        token_ids = sampled.token_ids.tolist()
        still = []
        for row, token_id, logprobs, error in zip(going, token_ids, sampled.logprobs, sampled.errors, strict=True):
            if error is not None:
                results[row] = Verified(error=error)
                continue
            results[row].token_ids.append(token_id)
            if logprobs is not None:
                results[row].logprobs.append(logprobs)
            is_over = take(slots[row], token_id)
            if not is_over and place < len(drafts[row]) and drafts[row][place] == token_id:
                still.append(row)
        going, place = still, place + 1
    return results
