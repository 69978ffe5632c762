"""What a prompt must be to get in. Pure functions; what depends on the queue is the scheduler's."""

from __future__ import annotations

from diptych.core.request import Request
from diptych.core.sequence import Sequence
from diptych.errors import PromptTooLong, RequestError
from diptych.scheduler.step import SchedulerLimits


def check_prompt(token_ids: list[int], limits: SchedulerLimits) -> None:
    """Raise RequestError, naming the field, for a prompt that is empty, too long, or not of the vocabulary."""
    if not token_ids:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    if len(token_ids) >= limits.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(token_ids)} tokens; beside one of output {limits.max_model_len - 1} fit:"
            " shorten it, or raise --max-model-len or --kv-cache-memory",
            param="prompt",
        )
    if not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        raise RequestError(f"prompt token ids must be in 0..{limits.vocab_size - 1}", param="prompt")


def new_sequence(request: Request, limits: SchedulerLimits, arrival_order: int) -> Sequence:
    """The sequence of a request whose prompt has been checked, and how long it may become."""
    max_len = limits.max_model_len
    if request.sampling.max_tokens is not None:
        max_len = min(max_len, len(request.prompt_token_ids) + request.sampling.max_tokens)
    return Sequence(request, list(request.prompt_token_ids), max_len, arrival_order=arrival_order)
