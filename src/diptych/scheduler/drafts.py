"""How many drafts each sequence may verify in its next step: as many as are expected to pay.

Owns what has been learnt of each sequence's acceptance and of the cost of a step. Knows nothing of how drafts are made,
nor whether a worker finds any. Engine thread; never imports torch.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from diptych.core.batch import RowOutput, SequenceStep, Speculation, StepOutput
from diptych.core.sequence import Sequence
from diptych.kv.cache import KVCache, SequencePages
from diptych.scheduler.step import Counters

PRIOR_ACCEPTANCE = 0.7
"""Of a sequence of which nothing is known: most drafts that a drafter finds worth proposing are right."""
LEARNING_RATE = 0.2
"""Weight of one draft's fate against all before."""
FORGETTING_RATE = 0.002
"""How far a step without drafts takes an estimate back to the prior: a sequence that was hard is tried again."""


class StepTimes:
    """Time of a step as a straight line over its tokens, fitted to the latest steps, each a little more than the last.

    Until steps of different sizes have been seen, a token is taken to cost `PRIOR_SLOPE` of a step of one.
    """

    DECAY = 0.98
    PRIOR_SLOPE = 0.05

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_s = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step has taken so long."""
        self._weight = self._weight * self.DECAY + 1.0
        share = 1.0 / self._weight
        off_tokens, off_s = num_tokens - self._mean_tokens, seconds - self._mean_s
        self._mean_tokens += share * off_tokens
        self._mean_s += share * off_s
        self._variance += share * (off_tokens * (num_tokens - self._mean_tokens) - self._variance)
        self._covariance += share * (off_tokens * (seconds - self._mean_s) - self._covariance)

    def relative_slope(self, num_tokens: float) -> float:
        """Cost of one token more, as a share of the time of a step of `num_tokens`."""
        slope = 0.0
        if self._variance > 0.25:
            slope = self._covariance / self._variance
        elif self._mean_s > 0.0:
            slope = self.PRIOR_SLOPE * self._mean_s / (1.0 + self.PRIOR_SLOPE * self._mean_tokens)
        step_s = self._mean_s + slope * (num_tokens - self._mean_tokens)
        if step_s <= 0.0 or slope < 0.0:
            return self.PRIOR_SLOPE / (1.0 + self.PRIOR_SLOPE * num_tokens)
        return slope / step_s


class DraftPlanner:
    """Deals out drafts, one step after the other.

    A draft pays if it makes tokens come faster: with N tokens expected of a step that takes t, and the next draft right
    with probability p at the cost dt, if p / N > dt / t. So a lone sequence may draft while acceptance is middling, and
    a batch that keeps the device busy drafts only what is nearly certain, or not at all.

    Args: most: drafts of a sequence in one step. is_adaptive: False gives every sequence that many, always.
    """

    def __init__(self, cache: KVCache, most: int, *, is_adaptive: bool) -> None:
        self._cache = cache
        self._most = most
        self._is_adaptive = is_adaptive
        self._times = StepTimes()
        self._acceptance: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        self._expected_tokens = 1.0
        self._num_tokens = self._num_decodes = 1

    def begin_step(self, num_decodes: int) -> None:
        """A step is being planned in which so many sequences decode."""
        self._num_tokens = self._num_decodes = max(1, num_decodes)
        self._expected_tokens = float(self._num_tokens)

    def allow(self, sequence: Sequence, pages: SequencePages, budget: int) -> int:
        """Drafts for a decoding sequence whose next token's page is reserved; reserves theirs, but retracts nobody.

        budget: tokens that the step has left besides.
        """
        if not self._most:
            return 0
        start = sequence.num_computed_tokens
        # The last token is never computed, and the one that is sampled after all drafts needs a place, too.
        most = max(0, min(self._most, budget, sequence.max_len - start - 2))
        if self._is_adaptive:
            most = self._worthwhile(sequence, most)
        num_lacking = self._cache.num_pages_for(start + 1 + most) - len(pages.pages)
        # A page for every other sequence's next token is worth more than drafts.
        if num_lacking > 0 and num_lacking + self._num_decodes > self._cache.num_available:
            return max(0, min(most, len(pages.pages) * self._cache.page_size - start - 1))
        self._cache.extend(pages, start + 1 + most)
        return most

    def learn(self, sequence: Sequence, row: RowOutput, counters: Counters) -> None:
        """A row with drafts has been verified."""
        accepted = max(0, len(row.token_ids) - 1)
        sequence.speculation = (sequence.speculation or Speculation()).after(row)
        counters.verifications_total += 1
        counters.drafts_total += row.num_drafts
        counters.accepted_drafts_total += accepted
        acceptance = self._acceptance.get(sequence, PRIOR_ACCEPTANCE)
        acceptance = 1.0 - (1.0 - acceptance) * (1.0 - LEARNING_RATE) ** accepted
        if accepted < row.num_drafts:
            acceptance *= 1.0 - LEARNING_RATE
        self._acceptance[sequence] = acceptance

    def note_step(self, steps: list[SequenceStep], output: StepOutput) -> None:
        """A step is over. Only steps of decodes alone tell what a draft costs."""
        if self._most and all(step.num_tokens == 1 for step in steps):
            self._times.note(len(steps) + sum(row.num_drafts for row in output.rows), output.compute_s)

    def _worthwhile(self, sequence: Sequence, most: int) -> int:
        acceptance = self._acceptance.get(sequence, PRIOR_ACCEPTANCE)
        chance, count = acceptance, 0
        while count < most and chance > self._expected_tokens * self._times.relative_slope(self._num_tokens):
            count += 1
            self._num_tokens += 1
            self._expected_tokens += chance
            chance *= acceptance
        if count == 0:
            self._acceptance[sequence] = acceptance + FORGETTING_RATE * (PRIOR_ACCEPTANCE - acceptance)
        return count
