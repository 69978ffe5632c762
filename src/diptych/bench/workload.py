"""What a benchmark asks for: prompts and output lengths, made from a seed or read from a file.

Deterministic: the same arguments give the same requests on every machine. Knows nothing of engines, clocks or servers.
"""

from __future__ import annotations

import enum
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from diptych.errors import ConfigError

DEFAULT_NUM_PROMPTS = 32

# Of a vocabulary that names no special tokens, only the middle is used: they are kept at one of its ends.
_MARGIN = 4


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt made of chat messages."""

    messages: list[dict[str, Any]]


Prompt = list[int] | str | Conversation


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: token ids, a text or a conversation, and how many tokens to generate."""

    prompt: Prompt
    max_tokens: int


class Headline(enum.StrEnum):
    """The figure that a case is about."""

    INPUT_RATE = "input tok/s"
    OUTPUT_RATE = "output tok/s"
    DECODE_RATE = "decode tok/s"
    MS_PER_TOKEN = "ms/token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests that are measured together. Each of `rounds` starts on an idle engine and has a clock of its own."""

    name: str
    rounds: tuple[tuple[BenchRequest, ...], ...]
    headline: Headline = Headline.OUTPUT_RATE

    @property
    def requests(self) -> list[BenchRequest]:
        """Those of all rounds."""
        return [request for requests in self.rounds for request in requests]

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt given as token ids, with its output."""
        lens = (len(item.prompt) + item.max_tokens for item in self.requests if isinstance(item.prompt, list))
        return max(lens, default=0)

    @property
    def max_token_id(self) -> int:
        """The largest token id of any prompt, -1 if none is given as token ids."""
        ids = (max(item.prompt) for item in self.requests if isinstance(item.prompt, list) and item.prompt)
        return max(ids, default=-1)


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A length in tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, *, flag: str) -> LengthRange:
        """The range that "128" or "128:512" means. Raises: ConfigError naming `flag`."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= low <= high:
            raise ConfigError(f"{flag} must be MIN or MIN:MAX with 1 <= MIN <= MAX, got {text!r}")
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        """One length."""
        return source.randint(self.low, self.high)


class Vocabulary:
    """The token ids that random prompts are made of.

    Args: size: ids run from 0 to size - 1. special_ids: left out; None if they are not known, which leaves out the
    first and the last quarter of the ids instead. Raises: ConfigError if nothing is left.
    """

    def __init__(self, size: int, special_ids: Collection[int] | None = None) -> None:
        if special_ids is None:
            self._ids = list(range(size // _MARGIN, size - size // _MARGIN))
        else:
            self._ids = [token_id for token_id in range(size) if token_id not in special_ids]
        if not self._ids:
            raise ConfigError(f"a vocabulary of {size} tokens has none that a random prompt could be made of")

    def __len__(self) -> int:
        return len(self._ids)

    def draw(self, source: random.Random, num_tokens: int) -> list[int]:
        """Token ids drawn uniformly."""
        return source.choices(self._ids, k=num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """What random requests look like. shared_prefix_len: tokens in front of every prompt, the same for all, which
    input_len does not count.
    """

    num_prompts: int = DEFAULT_NUM_PROMPTS
    input_len: LengthRange = LengthRange(512, 512)
    output_len: LengthRange = LengthRange(128, 128)
    shared_prefix_len: int = 0
    seed: int = 0


def synthetic_requests(spec: SyntheticSpec, vocabulary: Vocabulary) -> tuple[BenchRequest, ...]:
    """Random requests; the same spec and vocabulary give the same ones."""
    if spec.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {spec.num_prompts}")
    if spec.shared_prefix_len < 0:
        raise ConfigError(f"--shared-prefix-len must not be negative, got {spec.shared_prefix_len}")
    source = random.Random(spec.seed)
    prefix = vocabulary.draw(source, spec.shared_prefix_len)
    return tuple(
        BenchRequest(prefix + vocabulary.draw(source, spec.input_len.draw(source)), spec.output_len.draw(source))
        for _ in range(spec.num_prompts)
    )


class _Row(msgspec.Struct, forbid_unknown_fields=False):
    """One line of a dataset."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def dataset_requests(
    path: Path, *, num_prompts: int | None, output_len: LengthRange, seed: int
) -> tuple[BenchRequest, ...]:
    """Requests of a JSONL file: a row has `prompt`, `prompt_token_ids` or `messages`, and may have `max_tokens`.

    Args: num_prompts: the first so many rows; None is all. output_len: for rows without max_tokens, drawn with `seed`.
    Raises: ConfigError naming file and line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error}") from error
    source = random.Random(seed)
    requests: list[BenchRequest] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (num_prompts is None or len(requests) < num_prompts):
            requests.append(_request_of_row(line, f"{path}, line {number}", output_len.draw(source)))
    if not requests:
        raise ConfigError(f"the dataset {path} holds no rows")
    return tuple(requests)


def _request_of_row(line: bytes, where: str, default_max_tokens: int) -> BenchRequest:
    try:
        row = msgspec.convert(orjson.loads(line), _Row)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: {error}") from error
    given: list[Prompt] = [prompt for prompt in (row.prompt, row.prompt_token_ids) if prompt is not None]
    if row.messages is not None:
        given.append(Conversation(row.messages))
    if len(given) != 1:
        raise ConfigError(f"{where}: a row has exactly one of prompt, prompt_token_ids and messages")
    max_tokens = default_max_tokens if row.max_tokens is None else row.max_tokens
    if max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens must be at least 1, got {max_tokens}")
    return BenchRequest(given[0], max_tokens)


def warmup_requests(requests: Sequence[BenchRequest], count: int, *, max_tokens: int) -> tuple[BenchRequest, ...]:
    """The first `count` requests written backwards: as long, but nothing that a prefix cache could keep for them."""
    return tuple(
        BenchRequest(_backwards(request.prompt), min(request.max_tokens, max_tokens)) for request in requests[:count]
    )


def _backwards(prompt: Prompt) -> Prompt:
    if isinstance(prompt, Conversation):
        return Conversation([_message_backwards(message) for message in prompt.messages])
    return prompt[::-1]


def _message_backwards(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": content[::-1]} if isinstance(content, str) else message
