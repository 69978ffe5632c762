"""Drafts from the text itself: what followed the last few tokens when they occurred before. Needs no model.

Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding; as LLMA, Yang et al. 2023,
https://arxiv.org/abs/2304.04487. Worker's thread.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.core.batch import SequenceStep
from diptych.speculative.drafter import DraftRow, Texts

MIN_MATCH = 2
"""Tokens that must have occurred before in this order; single ones mean little."""
MAX_MATCH = 8
"""A longer match is no better sign."""


class NgramDrafter:
    """A `Drafter` that looks for the end of a text in the text."""

    needs_hidden = False

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def admit(self, slot: int, num_cached_tokens: int) -> None:
        """There is nothing to prepare."""

    def follow(self, steps: list[SequenceStep], hidden: torch.Tensor | None) -> None:
        """There is nothing to compute."""

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        return [continuation(self._texts.of(row.slot), row.most) for row in rows]


def continuation(text: NDArray[np.int32], most: int) -> list[int]:
    """What followed the latest of the longest matches of the text's end; where that runs into the end, it repeats.

    Args: text: int32 [n]. Returns: `most` tokens, or none without a match of MIN_MATCH tokens.
    """
    last = len(text) - 1
    if last < MIN_MATCH:
        return []
    ends = np.flatnonzero(text[:last] == text[last])
    length = 1
    while length < MAX_MATCH:
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[last - length]]
        if len(longer) == 0:
            break
        ends, length = longer, length + 1
    if len(ends) == 0 or length < MIN_MATCH:
        return []
    start = int(ends[-1]) + 1
    period = len(text) - start
    found: list[int] = text[start : start + most].tolist()
    return [found[place % period] for place in range(most)]
