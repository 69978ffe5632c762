"""Names to model classes."""

from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from diptych.models.registry import MODELS, Registry
from diptych.models.transformer import Transformer


@pytest.mark.parametrize("name", MODELS.names())
def test_every_entry_is_a_transformer(name: str) -> None:
    assert issubclass(MODELS.resolve(name), Transformer)


def test_unknown_name_lists_the_known_ones() -> None:
    registry: Registry[object] = Registry("colour", {"red": "x:y", "blue": "x:z"})
    with pytest.raises(ConfigError, match="colour 'green' is not supported; supported are: blue, red"):
        registry.check("green")
    with pytest.raises(ConfigError):
        registry.resolve("green")
