"""What `--lora-paths` says: which adapters to load at start, and under which names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diptych.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdapterPath:
    """One adapter to load. pinned: once on the device, it stays there."""

    name: str
    path: str
    pinned: bool = False


def parse_lora_paths(entries: Iterable[str]) -> list[AdapterPath]:
    """Each entry is name=folder, a folder alone (then also its name), or JSON with lora_name, lora_path and pinned.

    Raises: ConfigError naming an entry that is none of these, or a name that is given twice.
    """
    found = [_parse(entry.strip()) for entry in entries]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"lora_paths names {twice!r} twice")
    return found


def _parse(entry: str) -> AdapterPath:
    if entry.startswith("{"):
        return _from_json(entry)
    name, equals, path = entry.partition("=")
    if not name or (equals and not path):
        raise ConfigError(f"lora_paths takes name=folder, a folder, or JSON, got {entry!r}")
    return AdapterPath(name=name, path=path or name)


def _from_json(entry: str) -> AdapterPath:
    try:
        fields: dict[str, Any] = json.loads(entry)
    except ValueError as error:
        raise ConfigError(f"lora_paths holds {entry!r}, which is not JSON: {error}") from error
    path, pinned = fields.get("lora_path", fields.get("path")), fields.get("pinned", False)
    name = fields.get("lora_name", fields.get("name", path))
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path or not isinstance(pinned, bool):
        raise ConfigError(f"lora_paths holds {entry!r}, which needs lora_name and lora_path, and may have pinned")
    return AdapterPath(name=name, path=path, pinned=pinned)
