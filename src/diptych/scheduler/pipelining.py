"""Which running sequences may be planned while steps are in flight, and how decodes are spread over those.

With one stage every sequence that has tokens left to compute may be planned: the worker knows its own last token. With
pipeline stages the first one does not know what the last has sampled, so a sequence decodes on when its token has come
back; the chunks of a prompt, all known, follow one another. Engine thread; never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from diptych.core.sequence import Sequence


class Pipeline:
    """Chooses for one step after the other.

    Args: depth: steps in flight at most. awaits_tokens: whether a sequence waits for its last token.
    """

    def __init__(self, depth: int, *, awaits_tokens: bool) -> None:
        self._depth = depth
        self._awaits_tokens = awaits_tokens
        self._num_turns = 0
        self._turns: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def ready(self, running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that may decode in the next step, and those with chunks of a prompt, each in the order to serve.

        Where tokens are awaited, a step takes its share of all that decode and no more: all in one step would leave the
        other stages idle until it is back. Who has waited longest goes first.
        """
        unfinished = [s for s in running if s.num_uncomputed_tokens > 0]
        chunks = [s for s in unfinished if s.num_uncomputed_tokens > 1]
        decodes = [s for s in unfinished if s.num_uncomputed_tokens == 1]
        if not self._awaits_tokens:
            return decodes, chunks
        share = -(-len(decodes) // self._depth)
        confirmed = [s for s in decodes if not s.num_pending_tokens]
        chosen = sorted(confirmed, key=lambda s: self._turns.get(s, 0))[:share]
        for sequence in chosen:
            self._num_turns += 1
            self._turns[sequence] = self._num_turns
        return chosen, chunks
