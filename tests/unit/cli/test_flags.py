"""Flags, the config file, and how the two combine."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.cli.flags import EngineFlags, parse_engine_flags
from diptych.config import EngineConfig
from diptych.config_tree import config_from_tree
from diptych.errors import ConfigError


def parse(*arguments: str) -> EngineConfig:
    return parse_engine_flags(EngineFlags, arguments, prog="diptych serve", description="test").engine


@pytest.fixture
def config_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_no_flags_are_the_defaults():
    assert parse() == EngineConfig()


def test_flags_reach_their_sections():
    config = parse("--page-size", "32", "--no-prefix-caching", "--dtype=float32", "--max_num_seqs", "3", "--port", "0")
    assert config.cache.page_size == 32
    assert not config.cache.prefix_caching
    assert config.model.dtype == "float32"
    assert config.scheduler.max_num_seqs == 3
    assert config.server.port == 0


@pytest.mark.parametrize(
    "arguments", [("m", "--port", "1"), ("--port", "1", "m"), ("--port", "1", "--model-path", "m")]
)
def test_model_stands_anywhere(arguments):
    config = parse(*arguments)
    assert (config.model.model_path, config.server.port) == ("m", 1)


def test_two_models_are_refused():
    with pytest.raises(ConfigError, match="two models are named: MODEL 'a' and --model-path 'b'"):
        parse("a", "--model-path", "b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-siz", "32"], "unknown flag --page-siz; did you mean --page-size?"),
        (["--page-siz=32"], "unknown flag --page-siz; did you mean --page-size?"),
        (["--zzz"], "unknown flag --zzz; see diptych serve --help"),
        (["a", "b"], "unexpected argument 'b'"),
        (["--dtype", "float8"], "invalid choice 'float8' for argument '--dtype'"),
        (["--page-size", "x"], "--page-size: invalid literal"),
        (["--page-size"], "Missing value for argument '--page-size'"),
        (["--config"], "--config needs a file"),
        (["--config", "missing.yaml"], "cannot read the config file missing.yaml"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(arguments, message):
    with pytest.raises(ConfigError) as raised:
        parse(*arguments)
    assert message in str(raised.value)
    assert str(raised.value).isascii()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "cache: {page_size: 32}\nserver: {port: 7}",
        "page_size: 32\nport: 7",
        "page-size: 32\nserver:\n  port: 7",
    ],
)
def test_config_file_has_sections_or_flat_keys(config_file, text):
    config = parse("--config", config_file(text))
    assert (config.cache.page_size, config.server.port) == (32, 7)
    assert config.scheduler == EngineConfig().scheduler


def test_flags_override_the_file(config_file):
    path = config_file("page_size: 32\nmodel_path: from-file\nport: 7")
    config = parse("mine", "--config", path, "--page-size", "64")
    assert (config.model.model_path, config.cache.page_size, config.server.port) == ("mine", 64, 7)


def test_an_empty_file_changes_nothing(config_file):
    assert parse("--config", config_file("")) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise: 32", "unknown key page_sise; did you mean page_size?"),
        ("cache: {page-sise: 32}", "unknown key cache.page-sise; did you mean page_size?"),
        ("server: {page_size: 32}", "unknown key server.page_size"),
        ("page_size: 32\ncache: {page_size: 16}", "page_size is given twice"),
        ("page_size: many", "Expected `int`, got `str` - at `$.cache.page_size`"),
        ("dtype: float8", "$.model.dtype"),
        ("model: some/folder", "model is a section of model_path"),
        ("- 1", "must hold a mapping"),
        ("a: [", "cannot read the config file"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(config_file, text, message):
    with pytest.raises(ConfigError) as raised:
        parse("--config", config_file(text))
    assert message in str(raised.value)
    assert "config.yaml" in str(raised.value)


def test_parallel_sizes_have_the_names_that_users_know():
    config = parse("--tp", "2", "--pipeline-parallel-size=3", "--ep_size", "2")
    assert (config.parallel.tp_size, config.parallel.pp_size, config.parallel.ep_size) == (2, 3, 2)
    assert config_from_tree({"tensor_parallel_size": 2, "parallel": {"pp": 4}}, "LLM").parallel.world_size == 8
    with pytest.raises(ConfigError, match="LLM: tp_size is given twice"):
        config_from_tree({"tensor_parallel_size": 2, "tp-size": 2}, "LLM")
