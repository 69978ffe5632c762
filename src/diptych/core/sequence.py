"""A request on its way through the engine: tokens, counters, pages and one state.

Progress is counters, not phases: prefill, chunked prefill, decode and recomputation after a retraction are all "tokens
known minus tokens computed". Owned by the scheduler, on the engine's thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from diptych.core.batch import Speculation, TokenLogprobs
from diptych.core.request import Request
from diptych.errors import InvariantError


class SequenceState(enum.Enum):
    """Where a sequence is, and thereby who owns its pages."""

    WAITING = "waiting"  # no pages
    LOADING = "loading"  # pages owned by the transfer that fills them
    RUNNING = "running"  # pages owned by the sequence
    SENDING = "sending"  # pages owned by the sequence, pinned until a peer has them
    FINISHED = "finished"  # no pages; whole ones may live on in the prefix cache


_S = SequenceState

TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.LOADING, _S.FINISHED}),
    _S.LOADING: frozenset({_S.RUNNING, _S.WAITING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.SENDING, _S.FINISHED}),  # to WAITING: retracted
    _S.SENDING: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Mutable progress of one request.

    token_ids: prompt, then sampled tokens known to the host. num_computed_tokens: tokens whose KV is computed or will
    be by a step in flight; num_confirmed_tokens: by steps that have finished. num_pending_tokens: tokens that steps in
    flight will sample. num_inflight_steps: submitted steps with a row of this sequence; its pages and slot are given
    back only when this is 0. max_len: prompt plus output at most. num_cached_tokens: prompt tokens taken from the
    prefix cache. is_answered: the client has had the last word; only the pages are still to be given back. queue_s:
    seconds from arrival to the first step. speculation: what drafts have brought.
    """

    request: Request
    token_ids: list[int]
    max_len: int
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_inflight_steps: int = 0
    num_cached_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_retractions: int = 0
    num_prompt_logprobs_sent: int = 0
    arrival_order: int = 0
    is_answered: bool = False
    queue_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    speculation: Speculation | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens known to the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those still in flight included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a next step may compute: 1 for a decode, more for a prefill, 0 when fully planned."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    def move_to(self, state: SequenceState) -> None:
        """Change state; the only place where it changes. Raises InvariantError for an unlisted transition."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"request {self.request_id}: {self.state.name} -> {state.name} is not a transition")
        self.state = state
