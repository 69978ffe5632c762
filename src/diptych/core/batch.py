"""What crosses between engine and worker: one step's work and its result.

One ragged batch holds prefill chunks, decodes and (later) draft verification alike; a row is a sequence's next
`num_tokens` tokens. The worker keeps a table of slots (pages, sampling state, last token), so a decode row is a few
integers. Messages are applied strictly in order: releases, then admissions, then rows. Never imports torch.
"""

from __future__ import annotations

import enum

import msgspec

from diptych.core.request import SamplingParams


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """Binds a sequence to a worker slot until a later batch releases it.

    token_ids: the prompt and, after a retraction, the output so far; the first `num_prompt_tokens` are the prompt
    (penalties, grammar and seeded sampling resume from the rest). eos_token_ids: empty when EOS is ignored.
    """

    slot: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    max_tokens: int


class SequenceStep(msgspec.Struct, array_like=True, frozen=True):
    """One row of a batch: compute positions `start .. start + num_tokens - 1` of the sequence in `slot`.

    Token ids come from the slot: the admission's list, then what the worker itself sampled. new_pages: pages appended
    to the slot's page list before this step. samples: the row reaches the sequence's end, so a token is sampled.
    """

    slot: int
    start: int
    num_tokens: int
    new_pages: list[int]
    samples: bool


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """One step. A batch without rows only updates the slot table and yields a StepOutput without rows."""

    step_id: int
    releases: list[int]
    admissions: list[Admission]
    steps: list[SequenceStep]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows."""
        return sum(step.num_tokens for step in self.steps)


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities (natural, of the raw model distribution) at one position.

    logprob, rank: of the token itself (rank 1 is the likeliest). top: the likeliest (token id, logprob), best first.
    extra: the same for `logprob_token_ids`, in the order asked.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    extra: list[tuple[int, float]] = []


class RowOutput(msgspec.Struct, array_like=True, frozen=True):
    """Result of one row.

    token_ids: empty when the row sampled nothing: a chunk before the prompt's end, or a sequence whose previous token
    (in flight when this step was planned) already ended it. logprobs: parallel to token_ids when asked for.
    prompt_logprobs: for the positions of this chunk that were asked for; the entry of position p predicts token p.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    error: str | None = None


class StepOutput(msgspec.Struct, array_like=True, frozen=True):
    """Result of one batch; `rows` is parallel to `Batch.steps`. compute_s: wall time on the worker."""

    step_id: int
    rows: list[RowOutput]
    compute_s: float
