from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from diptych.lora_paths import AdapterPath, parse_lora_paths


def test_every_form() -> None:
    entries = ["sql=/adapters/sql", "/adapters/plain", '{"lora_name": "c", "lora_path": "/c", "pinned": true}']
    assert parse_lora_paths(entries) == [
        AdapterPath(name="sql", path="/adapters/sql"),
        AdapterPath(name="/adapters/plain", path="/adapters/plain"),
        AdapterPath(name="c", path="/c", pinned=True),
    ]


@pytest.mark.parametrize("entry", ["", "=x", "x=", "{", '{"lora_name": "a"}', '{"lora_path": "a", "pinned": 1}'])
def test_what_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="lora_paths"):
        parse_lora_paths([entry])


def test_a_name_given_twice() -> None:
    with pytest.raises(ConfigError, match="names 'a' twice"):
        parse_lora_paths(["a=1", "a=2"])
