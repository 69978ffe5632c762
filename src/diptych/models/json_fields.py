"""Typed look-up in a JSON object that somebody else wrote; every complaint names the file, the key and the value.

Never imports torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson

from diptych.errors import ConfigError

JSONObject = dict[str, Any]

MAX_SIZE = 1 << 28
"""Above any dimension, context length or vocabulary of a model."""


def read_json(path: Path) -> JSONObject:
    """The object in a JSON file. Raises ConfigError if it cannot be read, is no JSON or no object."""
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check the path and its permissions.") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__} instead of a JSON object.")
    return content


class Fields:
    """One JSON object. A key that is null counts as missing.

    Args: where: names the object in error messages, such as the file's path.
    """

    def __init__(self, content: JSONObject, where: str) -> None:
        self.content = content
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.content.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to MAX_SIZE. Raises ConfigError if it is missing without a default, or not one."""
        value = self.content.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
            raise self.wrong(key, value, f"an integer from 1 to {MAX_SIZE}")
        return value

    def count(self, key: str, default: int) -> int:
        """As `size`, or 0."""
        value = self.content.get(key)
        return 0 if (default if value is None else value) == 0 else self.size(key, default)

    def optional_size(self, key: str, default: int | None = None) -> int | None:
        """A positive integer; a key that is there but null means None, a missing key the default."""
        if key in self.content and self.content[key] is None:
            return None
        return self.size(key) if self.has(key) else default

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero. Raises ConfigError if it is missing without a default, or not one."""
        value = self.content.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above zero, or None if the key is missing or null."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.content.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string, or the default."""
        value = self.content.get(key)
        value = default if value is None else value
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings, or None."""
        value = self.content.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.wrong(key, value, "a list of strings")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty if missing."""
        value = self.content.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self.wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def nested(self, key: str) -> Fields | None:
        """The object under `key`, or None."""
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Fields(value, f"{self.where}: {key}")

    def wrong(self, key: str, value: object, expected: str) -> ConfigError:
        """The error for a value that is not what was expected."""
        found = "is missing" if value is None else f"is {value!r}"
        return ConfigError(
            f"{self.where}: {key!r} {found}, expected {expected}. Check that this is the model you meant."
        )
