"""From a mapping of names to an EngineConfig: what a YAML file or keyword arguments say.

Keys stand in the sections of EngineConfig (`cache: {page_size: 32}`) or flat, named as the flags are (`page-size: 32`).
A key that is unknown, given twice or of the wrong type is an error that names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec

from diptych.config import EngineConfig
from diptych.errors import ConfigError

# Other names under which users know a field.
ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "lora_modules": "lora_paths",
    "max_loras_per_batch": "max_loras",
}


def field_name(key: object) -> str:
    """A key as the field that it means is called: with underscores, and not by another name."""
    name = str(key).replace("-", "_")
    return ALIASES.get(name, name)


def section_fields() -> dict[str, tuple[str, ...]]:
    """Section of EngineConfig -> names of its fields."""
    hints = get_type_hints(EngineConfig)
    return {section.name: tuple(f.name for f in fields(hints[section.name])) for section in fields(EngineConfig)}


def config_from_tree(tree: Mapping[Any, Any], origin: str) -> EngineConfig:
    """The EngineConfig that `tree` describes; what it leaves out has its default.

    Raises: ConfigError, beginning with `origin`, if a key or value is wrong.
    """
    try:
        return msgspec.convert(_sorted_into_sections(tree, origin), EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _sorted_into_sections(tree: Mapping[Any, Any], origin: str) -> dict[str, dict[str, Any]]:
    sections = section_fields()
    owner_of = {name: section for section, names in sections.items() for name in names}
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}

    def place(section: str, name: str, value: Any) -> None:
        if name in values[section]:
            raise ConfigError(f"{origin}: {name} is given twice")
        values[section][name] = value

    for key, value in tree.items():
        name = field_name(key)
        if name in owner_of:
            place(owner_of[name], name, value)
        elif name in sections:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{origin}: {key} is a section of {', '.join(sections[name])}; got {value!r}")
            for inner_key, inner_value in value.items():
                inner = field_name(inner_key)
                if inner not in sections[name]:
                    raise _unknown_key(origin, f"{key}.{inner_key}", inner, sections[name])
                place(name, inner, inner_value)
        else:
            raise _unknown_key(origin, str(key), name, (*owner_of, *sections))
    return values


def _unknown_key(origin: str, shown: str, name: str, known: Iterable[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "`diptych serve --help` lists what can be set"
    return ConfigError(f"{origin}: unknown key {shown}; {hint}")
