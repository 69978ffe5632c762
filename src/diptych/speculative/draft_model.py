"""Drafts from a small model with the same vocabulary, which continues every text greedily.

Owns the small model's progress: which tokens of a slot have their keys and values. They lie in the target's pages, as
further layers, so they are cached, retracted and sent to peers with them. Where they are missing or stale (a page whose
text was not drafted for to its end), guesses are worse, and nothing else. Knows nothing of how guesses are verified.
Worker's thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from diptych.attention.backend import AttentionBackend, ForwardInputs
from diptych.core.batch import SequenceStep
from diptych.models.transformer import Transformer
from diptych.speculative.drafter import DraftRow, Texts

BuildInputs = Callable[[list[SequenceStep]], ForwardInputs]
"""Inputs of rows whose tokens are in the texts and whose pages are in the target's table."""


class ModelDrafter:
    """A `Drafter` with a model.

    Args: attention: over the draft's layers of the pool.
    """

    needs_hidden = False

    def __init__(
        self, model: Transformer, attention: AttentionBackend, texts: Texts, build_inputs: BuildInputs
    ) -> None:
        self._model = model
        self._attention = attention
        self._texts = texts
        self._build_inputs = build_inputs
        self._num_computed = np.zeros(len(texts.num_tokens), dtype=np.int64)

    def admit(self, slot: int, num_cached_tokens: int) -> None:
        self._num_computed[slot] = num_cached_tokens

    def follow(self, steps: list[SequenceStep], hidden: torch.Tensor | None) -> None:
        """Compute prompts as the target does; the tokens of decodes wait until something is to be drafted."""
        rows = [self._row(step.slot, step.start + step.num_tokens) for step in steps]
        self._model.forward_logit_rows(self._build_inputs(rows), self._attention)

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        drafts: dict[int, list[int]] = {row.slot: [] for row in rows}
        for row in rows:  # what was guessed wrongly is computed again, and the last token always
            known = int(self._texts.num_tokens[row.slot])
            self._num_computed[row.slot] = min(self._num_computed[row.slot], known - 1)
        for place in range(max(row.most for row in rows)):
            going = [row.slot for row in rows if place < row.most]
            steps = [self._row(slot, int(self._texts.num_tokens[slot]) + place, samples=True) for slot in going]
            for slot, token_id in zip(going, self._likeliest(steps), strict=True):
                drafts[slot].append(token_id)
                self._texts.token_ids[slot, self._texts.num_tokens[slot] + place] = token_id
        return [drafts[row.slot] for row in rows]

    def _row(self, slot: int, end: int, *, samples: bool = False) -> SequenceStep:
        """The tokens of a slot that are still to be computed, up to `end`."""
        start = int(min(self._num_computed[slot], end - 1))
        self._num_computed[slot] = end
        return SequenceStep(slot, start, end - start, [], samples)

    def _likeliest(self, steps: list[SequenceStep]) -> list[int]:
        hidden = self._model.forward_logit_rows(self._build_inputs(steps), self._attention)
        likeliest = self._model.likeliest(hidden)
        token_ids = self._model.logits(hidden).argmax(dim=1) if likeliest is None else likeliest[0]
        found: list[int] = token_ids.tolist()
        return found
