"""Learns up to which length decode engines serve a prompt faster by themselves: pure arithmetic over observed times.

Lengths fall into buckets of powers of two. The threshold is the end of the first buckets in which local prefill was
clearly faster; now and then it is taken one bucket higher or lower, so that both ways stay known at the edge, and only
there: long prompts are never tried where they would hold up a decode engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_BUCKET = 4  # up to 2**4 tokens
LAST_BUCKET = 20
MIN_SAMPLES = 8
MARGIN = 0.9  # a local prefill delays those who decode there: it must win by this much
EXPLORE = 0.05  # share of the choices taken one bucket higher, and of those one lower
STEP = 0.03  # by which an observation moves what is known, up or down


@dataclass(slots=True)
class RunningMedian:
    """Follows the median: an observation pulls it a step towards itself, however far off it is: stalls do no harm."""

    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        """One more observation; the first ones pull harder."""
        self.count += 1
        if self.value <= 0.0:
            self.value = value
            return
        step = max(STEP, 1.0 / (self.count + 1))
        self.value *= 1.0 + step if value > self.value else 1.0 / (1.0 + step)


@dataclass(slots=True)
class LocalPrefillLearner:
    """Times to first token by length of what had to be computed, here and there. draw: uniform in [0, 1)."""

    _local: dict[int, RunningMedian] = field(default_factory=dict)
    _remote: dict[int, RunningMedian] = field(default_factory=dict)

    def observe(self, num_tokens: int, *, is_local: bool, seconds: float) -> None:
        """A prompt of which `num_tokens` had to be computed had its first token after `seconds`."""
        side = self._local if is_local else self._remote
        side.setdefault(_bucket(num_tokens), RunningMedian()).add(seconds)

    @property
    def num_tokens(self) -> int:
        """Prompts that need fewer tokens than this are served faster by decode alone."""
        return _end(self._edge)

    def draw_threshold(self, draw: float) -> int:
        """The threshold for one choice: mostly `num_tokens`, sometimes a bucket off."""
        edge = self._edge
        if draw < EXPLORE:
            edge = min(edge + 1, LAST_BUCKET)
        elif draw >= 1.0 - EXPLORE:
            edge = max(edge - 1, FIRST_BUCKET - 1)
        return _end(edge)

    @property
    def _edge(self) -> int:
        """The last bucket for which decode alone wins, and all before it."""
        edge = FIRST_BUCKET - 1
        while edge < LAST_BUCKET and self._is_won(edge + 1):
            edge += 1
        return edge

    def _is_won(self, bucket: int) -> bool:
        local, remote = self._local.get(bucket), self._remote.get(bucket)
        if local is None or remote is None or min(local.count, remote.count) < MIN_SAMPLES:
            return False
        return local.value < MARGIN * remote.value


def _bucket(num_tokens: int) -> int:
    return min(max(num_tokens.bit_length(), FIRST_BUCKET), LAST_BUCKET)


def _end(bucket: int) -> int:
    """The first length beyond a bucket; 0 for none at all."""
    return 0 if bucket < FIRST_BUCKET else 2**bucket
