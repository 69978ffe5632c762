"""What a row's result means for its sequence: what is computed, whether it has ended, and which prompt logprobs are
new. Pure functions.
"""

from __future__ import annotations

from diptych.core.batch import FinishReason, RowOutput, SequenceStep, TokenLogprobs
from diptych.core.sequence import Sequence


def count_row(sequence: Sequence, step: SequenceStep, row: RowOutput) -> None:
    """Take a row that is no longer in flight into the sequence's counters."""
    sequence.num_inflight_steps -= 1
    sequence.num_pending_tokens -= step.samples
    if step.samples and not row.token_ids:
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, step.start)  # the worker skipped it
        return
    num_right = max(0, len(row.token_ids) - 1)  # drafts whose KV is what it would be had they been sampled before
    sequence.num_computed_tokens += num_right
    end = step.start + step.num_tokens + num_right
    sequence.num_confirmed_tokens = max(sequence.num_confirmed_tokens, end)


def finish_reason(
    sequence: Sequence, token_ids: list[int], eos_token_ids: frozenset[int]
) -> tuple[FinishReason | None, int | None]:
    """Why the sequence ends with the last of these new tokens, if it does, and the stop token that did it."""
    if not token_ids:
        return None, None
    last, sampling = token_ids[-1], sequence.request.sampling
    if sequence.num_output_tokens >= sampling.min_tokens:
        if last in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, last
        if last in sampling.stop_token_ids:
            return FinishReason.STOP, last
    if len(sequence.token_ids) >= sequence.max_len:
        return FinishReason.LENGTH, None
    return None, None


def new_prompt_logprobs(sequence: Sequence, step: SequenceStep, found: list[TokenLogprobs]) -> list[TokenLogprobs]:
    """Those not yet reported, which are counted as reported: a retracted prompt is computed again from its start."""
    if not found:
        return found
    first_wanted = max(1, sequence.request.sampling.prompt_logprobs_start)
    first_found = max(step.start + 1, first_wanted)
    new = found[max(0, first_wanted + sequence.num_prompt_logprobs_sent - first_found) :]
    sequence.num_prompt_logprobs_sent += len(new)
    return new
