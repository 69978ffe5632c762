"""What crosses between engine and worker: one step's work and its result.

One ragged batch holds prefill chunks, decodes and draft verification alike; a row is a sequence's next `num_tokens`
tokens. The worker keeps a table of slots (pages, sampling state, last token), so a decode row is a few
integers. Messages are applied strictly in order: releases, admissions, tokens, then rows. Never imports torch.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from diptych.core.request import SamplingParams

NO_ADAPTER = -1
"""In place of an adapter's slot: the base model."""


class AdapterPlacement(NamedTuple):
    """Put a loaded adapter into a slot of the device, where no row needs the one that was there before."""

    adapter_id: int
    slot: int


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """Binds a sequence to a worker slot until a later batch releases it.

    token_ids: the prompt and, after a retraction, the output so far; the first `num_prompt_tokens` are the prompt
    (penalties, grammar and seeded sampling resume from the rest). eos_token_ids: empty when EOS is ignored.
    adapter_slot: where the device has the sequence's adapter.
    """

    slot: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    max_tokens: int
    adapter_slot: int = NO_ADAPTER


class SequenceStep(msgspec.Struct, array_like=True, frozen=True):
    """One row of a batch: compute positions `start .. start + num_tokens - 1` of the sequence in `slot`.

    Token ids come from the slot: the admission's list, then what the worker itself sampled. new_pages: pages appended
    to the slot's page list before this step. samples: the row reaches the sequence's end, so a token is sampled.
    max_drafts: tokens beyond that the worker may guess and verify in the same step; pages for them are there. (In the
    worker, once it has guessed: how many of `num_tokens` are guesses.)
    """

    slot: int
    start: int
    num_tokens: int
    new_pages: list[int]
    samples: bool
    max_drafts: int = 0


class ConfirmedTokens(msgspec.Struct, array_like=True, frozen=True):
    """Tokens that earlier steps have yielded for the sequence in `slot`, in order."""

    slot: int
    token_ids: list[int]


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """One step. A batch without rows only updates the slot table and yields a StepOutput without rows.

    tokens: for pipeline stages before the last, which do not sample: those that the last one has sampled, that rows of
    this batch compute and that no batch has told so far (an admission brings its own). Empty without such stages.
    adapters: what moves into the device's slots before anything is computed.

    With data-parallel attention `groups` has a batch for each group, and nothing else is there. Each of them says what
    all groups bring: group_tokens, tokens of the step; group_rows, rows that sample.
    """

    step_id: int
    releases: list[int]
    admissions: list[Admission]
    steps: list[SequenceStep]
    tokens: list[ConfirmedTokens] = []
    adapters: list[AdapterPlacement] = []
    groups: list[Batch] = []
    group_tokens: list[int] = []
    group_rows: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows, with all the drafts that there may be."""
        return sum(step.num_tokens + step.max_drafts for step in self.steps)


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


class Speculation(msgspec.Struct, array_like=True, frozen=True):
    """What drafts have brought one request: steps that verified any, drafts verified, drafts that were right."""

    num_verifications: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens that a verifying step yielded, its own one included; 0 without any."""
        return 1.0 + self.num_accepted / self.num_verifications if self.num_verifications else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the drafts that were right."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    def after(self, row: RowOutput) -> Speculation:
        """The same with one verified row more."""
        return Speculation(
            self.num_verifications + 1,
            self.num_drafts + row.num_drafts,
            self.num_accepted + max(0, len(row.token_ids) - 1),
        )


class RowOutput(msgspec.Struct, array_like=True, frozen=True):
    """Result of one row.

    token_ids: empty when the row sampled nothing: a chunk before the prompt's end, or a sequence whose previous token
    (in flight when this step was planned) already ended it. logprobs: parallel to token_ids when asked for.
    prompt_logprobs: for the positions of this chunk that were asked for; the entry of position p predicts token p.
    num_drafts: guesses that were verified, of which all but the last of token_ids were right.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    error: str | None = None
    num_drafts: int = 0


class StepOutput(msgspec.Struct, array_like=True, frozen=True):
    """Result of one batch; `rows` is parallel to `Batch.steps`. compute_s: wall time on the worker.

    groups: results of `Batch.groups`; then there are no rows.
    """

    step_id: int
    rows: list[RowOutput]
    compute_s: float
    groups: list[StepOutput] = []
