"""Log-probabilities as OpenAI's two routes, vLLM and SGLang write them.

Knows how each dialect spells a token's text; the numbers come from the engine as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.core.batch import TokenLogprobs
from diptych.server.token_texts import TokenTexts

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.text_of(token_id),
        "logprob": _finite(logprob),
        "bytes": list(texts.bytes_of(token_id)),
    }


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choice.logprobs` of /v1/chat/completions."""
    content = []
    for entry in entries:
        item = _token(texts, entry.token_id, entry.logprob)
        item["top_logprobs"] = [_token(texts, token_id, logprob) for token_id, logprob in entry.top]
        content.append(item)
    return {"content": content}


class CompletionLogprobs:
    """`choice.logprobs` of /v1/completions; remembers the text offset from one chunk to the next."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._offset = 0

    def of(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of these tokens, in order; None where there is no number, as for the first token of a prompt."""
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._texts.text_of(token_id)
            result["tokens"].append(text)
            result["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            result["top_logprobs"].append(None if entry is None else self._top(entry, text))
            result["text_offset"].append(self._offset)
            self._offset += len(text)
        return result

    def _top(self, entry: TokenLogprobs, text: str) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of tokens with the same text the likelier one counts."""
        top: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._num_top]:
            top.setdefault(self._texts.text_of(token_id), _finite(logprob))
        top.setdefault(text, _finite(entry.logprob))
        return top


def prompt_entries(num_prompt: int, start: int, entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs | None]:
    """One entry for each prompt position from `start` on; None where the engine has none, as for position 0."""
    wanted = max(num_prompt - start, 0)
    known = entries[-wanted:] if wanted else []
    return [None] * (wanted - len(known)) + list(known)


def vllm_prompt_logprobs(
    texts: TokenTexts, entries: Sequence[TokenLogprobs | None]
) -> list[dict[int, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: by token id, the likeliest and the prompt's own."""
    return [None if entry is None else _by_token(texts, entry) for entry in entries]


def _by_token(texts: TokenTexts, entry: TokenLogprobs) -> dict[int, dict[str, Any]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
    return {
        token_id: {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text_of(token_id)}
        for token_id, logprob, rank in ranked
    }


NativeEntry = tuple[float | None, int, str | None]


class NativeLogprobs:
    """SGLang's `[logprob, token id, text or null]` lists.

    Args: with_text: whether the text is filled in.
    """

    def __init__(self, texts: TokenTexts, *, with_text: bool) -> None:
        self._texts = texts
        self._with_text = with_text

    def tokens(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[NativeEntry]:
        """Of the tokens themselves."""
        return [
            self._entry(None if entry is None else entry.logprob, token_id)
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]

    def top(self, entries: Sequence[TokenLogprobs | None], num_top: int) -> list[list[NativeEntry] | None]:
        """Of the likeliest tokens at each position."""
        return [
            None if entry is None else [self._entry(logprob, token_id) for token_id, logprob in entry.top[:num_top]]
            for entry in entries
        ]

    def chosen(self, entries: Sequence[TokenLogprobs | None]) -> list[list[NativeEntry] | None]:
        """Of the tokens that the request named (`token_ids_logprob`)."""
        return [
            None if entry is None else [self._entry(logprob, token_id) for token_id, logprob in entry.extra]
            for entry in entries
        ]

    def _entry(self, logprob: float | None, token_id: int) -> NativeEntry:
        text = self._texts.text_of(token_id) if self._with_text else None
        return (None if logprob is None else _finite(logprob), token_id, text)
