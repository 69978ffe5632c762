"""Request bodies to `SamplingParams`; a refusal names the field as the client wrote it."""

from __future__ import annotations

from typing import Any

from diptych.core.request import Grammar, SamplingParams
from diptych.errors import RequestError
from diptych.server.schemas import NativeSampling, SamplingFields
from diptych.server.structured import native_grammar

_NATIVE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
}


def _sampling(names: dict[str, str], **values: Any) -> SamplingParams:
    """SamplingParams of `values`. Errors name `names[field]` instead of our own field where there is one."""
    try:
        return SamplingParams(**values)
    except RequestError as error:
        param = names.get(error.param or "")
        if param is None or error.param is None:
            raise
        raise RequestError(str(error).replace(error.param, param), param=param) from None


def openai_sampling(
    body: SamplingFields,
    names: dict[str, str],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """Of an OpenAI-style body; the routes differ in how they spell limits and logprobs.

    Args: names: what this route calls a field of SamplingParams, where it differs.
    """
    return _sampling(
        names,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_text=body.include_stop_str_in_output or body.no_stop_trim,
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        skip_special_tokens=body.skip_special_tokens,
    )


def native_sampling(
    body: NativeSampling, *, logprobs: int | None, logprob_start: int | None, logprob_token_ids: list[int]
) -> SamplingParams:
    """Of SGLang's `sampling_params`. Args: logprob_start: first prompt position whose logprob is wanted, or None."""
    return _sampling(
        _NATIVE_NAMES,
        max_tokens=body.max_new_tokens or 1,
        min_tokens=body.min_new_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_text=body.no_stop_trim,
        ignore_eos=body.ignore_eos,
        seed=body.sampling_seed if body.sampling_seed is not None else body.seed,
        logprobs=logprobs,
        prompt_logprobs=None if logprob_start is None else logprobs,
        prompt_logprobs_start=logprob_start or 0,
        logprob_token_ids=tuple(logprob_token_ids),
        grammar=native_grammar(body),
        skip_special_tokens=body.skip_special_tokens,
    )
