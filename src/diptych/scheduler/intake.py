"""What a prompt must be to get in. Pure functions; what depends on the queue is the scheduler's."""

from __future__ import annotations

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
