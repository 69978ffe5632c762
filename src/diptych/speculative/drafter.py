"""The protocol of drafters: who guesses what a sequence will say next. A wrong guess costs time, never a wrong token.

Knows nothing of scheduling, sampling or how guesses are verified. Worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.core.batch import SequenceStep


@dataclass(frozen=True, slots=True)
class Texts:
    """What every slot's sequence has said so far; the worker's own tables, to be read.

    token_ids: int32 [slots, max length]. num_tokens: int64 [slots], how many of them are known.
    """

    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int64]

    def of(self, slot: int) -> NDArray[np.int32]:
        """The known tokens of one slot, a view."""
        return self.token_ids[slot, : self.num_tokens[slot]]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence of which at most `most` next tokens are to be guessed."""

    slot: int
    most: int


class Drafter(Protocol):
    """Guesses next tokens. The same texts must give the same guesses: every rank of a tensor group makes its own."""

    @property
    def needs_hidden(self) -> bool:
        """Whether it follows every token, with the target's hidden states."""
        ...

    def admit(self, slot: int, num_cached_tokens: int) -> None:
        """A sequence has taken a slot; of so many of its tokens the keys and values were there before."""
        ...

    def follow(self, steps: list[SequenceStep], hidden: torch.Tensor | None) -> None:
        """The target has computed these rows, at least one: prompts, or outputs that it computes again.

        With `needs_hidden` also what was just decoded; each row's next token is then known, and hidden, [T, hidden],
        holds the rows' hidden states after the last norm.
        """
        ...

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """Guesses for each row, none to `most` of them."""
        ...
