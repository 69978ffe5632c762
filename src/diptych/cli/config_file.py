"""Reads `--config file.yaml` into an EngineConfig; `config_tree` says what may stand in it."""

from __future__ import annotations

from pathlib import Path

import yaml

from diptych.config import EngineConfig
from diptych.config_tree import config_from_tree
from diptych.errors import ConfigError


def load_config_file(path: Path) -> EngineConfig:
    """The EngineConfig that a YAML file describes; what it leaves out has its default.

    Raises: ConfigError if the file cannot be read or is no mapping, or a key or value in it is wrong.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections or flags, not a {type(tree).__name__}")
    return config_from_tree(tree, str(path))
