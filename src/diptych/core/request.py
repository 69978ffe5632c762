"""What a client asks for: sampling parameters and the immutable request.

Owns the two types and their validation. Knows nothing of sequences, pages or devices.
"""

from __future__ import annotations

import enum
import math

import msgspec

from diptych.errors import RequestError

MAX_LOGPROBS = 128
MAX_SEED = 2**63 - 1


class GrammarKind(enum.StrEnum):
    """Language in which a structured-output constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


class Grammar(msgspec.Struct, frozen=True):
    """A structured-output constraint; `text` is JSON for `JSON_SCHEMA` and `CHOICE` (a list of strings)."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens and when to stop. Construction validates; a bad value raises RequestError naming its field.

    max_tokens: output tokens at most; None means up to the context limit (filled in by the server).
    top_k: 0 or -1 keeps all tokens. top_p, min_p: probabilities. temperature: 0 is greedy.
    stop: strings that end the output, found in the detokenized text. stop_token_ids: tokens that end it.
    seed: same seed and prompt, same text, whatever else is in the batch; None draws one.
    logprobs: None is off, 0 the chosen token's, k also the k likeliest. prompt_logprobs: the same for prompt tokens,
    from position `prompt_logprobs_start` on. logprob_token_ids: tokens whose logprob is always reported.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_text: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise RequestError(f"{name} must be between {low:g} and {high:g}, got {value!r}", param=name)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0, got 0; use temperature 0 for greedy output", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if any(not text for text in self.stop):
            raise RequestError("stop must not contain an empty string", param="stop")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0 or self.top_k == 1


# name, lowest, highest
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs_start", 0, 2**31 - 1),
)


class HandTo(msgspec.Struct, tag=True, frozen=True):
    """This engine computes the prompt, and whoever meets it in `room` decodes."""

    room: int


class TakeFrom(msgspec.Struct, tag=True, frozen=True):
    """The engine at `address` ("ip:port" of its rank) computes the prompt, and this one decodes.

    instance_id: of that engine, as its registry tells. room: where both are told to meet; None: this engine makes one
    and sends the prompt along.
    """

    address: str
    instance_id: str
    room: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. The server has tokenized it, resolved max_tokens and drawn the seed.

    cache_key: prompts share cached pages only under the same key (cache salt) and adapter. adapter: name of the one to
    use, "" for the base model. The engine fills in its number and what it computes with, its digest (which is there
    already if a peer says so, and must then be the same).
    priority: higher runs first. deadline: `time.time()` after which it is answered with DeadlineExceeded. handoff: the
    other engine that takes part, None if this one does it all.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_key: str = ""
    adapter: str = ""
    adapter_id: int = 0
    adapter_digest: str = ""
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    handoff: HandTo | TakeFrom | None = None

    @property
    def page_key(self) -> str:
        """Under which key its pages are cached: no client can write one that would find pages of another adapter."""
        if self.adapter:
            return f"\0adapter\0{self.adapter}\0{self.adapter_digest}\0{self.cache_key}"
        return f"\0base\0{self.cache_key}" if self.cache_key.startswith("\0") else self.cache_key
