"""Command-line flags generated from the dataclasses of `diptych.config`: flat names, help from the field docstrings.

The one place that knows the flag library. Values come from, in rising order: defaults, `--config` file, flags.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar, get_type_hints

import tyro

from diptych.cli.config_file import load_config_file
from diptych.config import EngineConfig
from diptych.config_tree import ALIASES
from diptych.errors import ConfigError

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The flags that describe an engine. A command with flags of its own derives from it."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]", help_behavior_hint="")] = None
    """Model to serve: Hugging Face folder, GGUF file or "demo"; the same as --model-path."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.yaml", help_behavior_hint="")] = None
    """YAML file with sections or flat keys; flags override it."""
    engine: EngineConfig = field(default_factory=EngineConfig)


EngineFlagsKind = TypeVar("EngineFlagsKind", bound=EngineFlags)


def flag_names(kind: type = EngineConfig) -> list[str]:
    """Every flag generated from a dataclass, as it is typed, in the order of its fields."""
    hints = get_type_hints(kind)
    names: list[str] = []
    for item in fields(kind):
        owner = hints[item.name]
        nested = isinstance(owner, type) and is_dataclass(owner)
        names.extend(flag_names(owner) if nested else ["--" + item.name.replace("_", "-")])
    return names


def parse_engine_flags(
    kind: type[EngineFlagsKind], arguments: Sequence[str], *, prog: str, description: str
) -> EngineFlagsKind:
    """Flags of `kind`; its `engine` holds the defaults, then the `--config` file, then the flags, then MODEL.

    `--help` prints and exits. Raises: ConfigError, in one line, for anything wrong.
    """
    base = _configured_engine(arguments)
    flags = parse_flags(kind, arguments, prog=prog, description=description, default=kind(engine=base))
    if flags.model is None:
        return flags
    configured = flags.engine.model.model_path
    if configured not in (flags.model, base.model.model_path):
        raise ConfigError(f"two models are named: MODEL {flags.model!r} and --model-path {configured!r}; give one")
    return replace(flags, engine=replace(flags.engine, model=replace(flags.engine.model, model_path=flags.model)))


def parse_flags(
    kind: type[Parsed], arguments: Sequence[str], *, prog: str, description: str, default: Parsed | None = None
) -> Parsed:
    """An instance of the dataclass `kind` from flags named after its fields, however deeply nested.

    Args: default: where fields that no flag sets come from. `--help` prints and exits.
    Raises: ConfigError, in one line, for an unknown flag (naming the nearest) or a bad value.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parsed, unknown = tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=[_own_name(argument) for argument in arguments],
                default=kind() if default is None else default,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_without_box(printed.getvalue())) from None
    if unknown:
        raise _unknown_argument(unknown, prog, flag_names(kind))
    return parsed


def _own_name(argument: str) -> str:
    """A flag under another name that users know (`--tensor-parallel-size=2`) as ours."""
    flag, equals, value = argument.partition("=")
    field_name = ALIASES.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
    return argument if field_name is None else f"--{field_name.replace('_', '-')}{equals}{value}"


def _configured_engine(arguments: Sequence[str]) -> EngineConfig:
    """What the file named by --config says; the defaults if none is named."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    try:
        path = finder.parse_known_args(list(arguments))[0].config
    except argparse.ArgumentError as error:
        raise ConfigError(f"--config needs a file: {error}") from error
    return EngineConfig() if path is None else load_config_file(path)


def _unknown_argument(unknown: Sequence[str], prog: str, known: Sequence[str]) -> ConfigError:
    flags = [argument for argument in unknown if argument.startswith("-")]
    if not flags:
        return ConfigError(f"unexpected argument {unknown[0]!r}; see {prog} --help")
    name = flags[0].partition("=")[0]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"see {prog} --help"
    return ConfigError(f"unknown flag {name}; {hint}")


def _without_box(text: str) -> str:
    """The message inside the frame that the flag library draws around it, as one line."""
    message: list[str] = []
    for line in text.splitlines():
        words = re.sub(r"[\u2500-\u257f]+|\x1b\[[0-9;]*m", " ", line).split()
        if words and not line.lstrip().startswith("\u256d"):
            message.extend(words)
        elif message:
            break
    return " ".join(message) or "the command line could not be understood"
