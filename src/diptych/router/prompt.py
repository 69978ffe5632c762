"""What a router needs to know of a request's body, and the one change that it makes to it.

The body stays bytes: it is read once for its prompt, and a pair's two fields are spliced in before its closing brace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from diptych.errors import RequestError
from diptych.router.prefixes import CHARS_PER_TOKEN, block_keys

_BOOTSTRAP_KEYS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_SALT_KEYS = ("cache_salt", "extra_key", "lora_path")
_PROMPT_KEYS = ("prompt", "text", "input_ids", "input")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A body, understood. body: JSON object without bootstrap fields. num_tokens: estimate. blocks: see `prefixes`."""

    body: bytes
    model: str
    num_tokens: int
    blocks: list[int]

    def with_bootstrap(self, host: str, port: int) -> bytes:
        """The body for a decode engine that is to let the prefill engine at `host` compute the prompt."""
        fields = orjson.dumps({"bootstrap_host": host, "bootstrap_port": port})[1:]
        inner = self.body.rstrip()[:-1].rstrip()
        return inner + (b"" if inner.endswith(b"{") else b",") + fields


def read_prompt(body: bytes) -> Prompt:
    """The prompt of a body of any generating route. Raises: RequestError if it is not a JSON object."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if any(key in value for key in _BOOTSTRAP_KEYS):  # which engines meet is decided here, not by a client
        value = {key: item for key, item in value.items() if key not in _BOOTSTRAP_KEYS}
        body = orjson.dumps(value)
    texts = list(_texts(value))
    salt = "\x00".join(item for key in _SALT_KEYS if isinstance(item := value.get(key), str))
    model = value.get("lora_path") or value.get("model")  # engines list their adapters as models
    return Prompt(body, model if isinstance(model, str) else "", _num_tokens(texts), block_keys(texts, salt))


def _num_tokens(texts: Sequence[str | list[int]]) -> int:
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    num_ids = sum(len(text) for text in texts if not isinstance(text, str))
    return num_ids + -(-num_chars // CHARS_PER_TOKEN)


def _texts(body: dict[str, Any]) -> Iterator[str | list[int]]:
    """Pieces of the prompt in order; of a batch, of all its prompts."""
    messages = body.get("messages")
    if isinstance(messages, list):
        if body.get("tools"):
            yield orjson.dumps(body["tools"]).decode()
        for message in messages:
            if isinstance(message, dict):
                yield from _message_texts(message)
        return
    for key in _PROMPT_KEYS:
        if body.get(key) is not None:
            yield from _prompt_texts(body[key])
            return


def _message_texts(message: dict[str, Any]) -> Iterator[str]:
    role = message.get("role")
    yield f"\x00{role}\x00"
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
    if message.get("tool_calls"):
        yield orjson.dumps(message["tool_calls"]).decode()


def _prompt_texts(prompt: Any) -> Iterator[str | list[int]]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):
        if prompt and isinstance(prompt[0], int):
            yield prompt
        else:
            yield from (item for item in prompt if isinstance(item, str | list))
