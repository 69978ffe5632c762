"""What a row's result means for its sequence: whether it has ended, and which prompt logprobs are new. Pure
functions.
"""

from __future__ import annotations

from diptych.core.batch import FinishReason, SequenceStep, TokenLogprobs
from diptych.core.sequence import Sequence


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
