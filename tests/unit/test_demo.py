"""The demo model's cache: made once, checked, made again when damaged."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from diptych import demo
from diptych.errors import ConfigError

CONTENT = b"GGUF and weights"


class StandIn:
    """The extra's package, with 16 bytes instead of 250 MB."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.num_assembled = 0

    def assemble(self, path: Path) -> Path:
        self.num_assembled += 1
        path.write_bytes(self.content)
        return path


@pytest.fixture
def install(monkeypatch, cache_dir):
    def install(package) -> None:
        monkeypatch.setattr(demo, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
        monkeypatch.setattr(demo.importlib, "import_module", lambda name: package)

    return install


def models_in(cache_dir) -> list:
    """What is cached besides compiled kernels, which all tests share."""
    return [path for path in cache_dir.iterdir() if path.name != "kernels"]


def test_it_is_assembled_once(install, cache_dir):
    package = StandIn()
    install(package)
    path = demo.demo_model_path()
    assert path == cache_dir / demo.DEMO_FILE_NAME
    assert path.read_bytes() == CONTENT
    assert demo.demo_model_path() == path
    assert package.num_assembled == 1
    assert models_in(cache_dir) == [path]


def test_a_damaged_cache_is_made_again(install, cache_dir):
    package = StandIn()
    install(package)
    demo.demo_model_path().write_bytes(CONTENT[:-1])
    assert demo.demo_model_path().read_bytes() == CONTENT
    assert package.num_assembled == 2


def test_another_file_is_refused_and_not_kept(install, cache_dir):
    install(StandIn(b"another model"))
    with pytest.raises(ConfigError, match=r"has SHA-256 [0-9a-f]{64}, expected"):
        demo.demo_model_path()
    assert models_in(cache_dir) == []


def test_a_damaged_extra_is_named(install, cache_dir):
    def assemble(path):
        raise FileNotFoundError("Missing chunk files: part02")

    install(SimpleNamespace(assemble=assemble))
    with pytest.raises(ConfigError, match=r"the demo extra is damaged .*part02"):
        demo.demo_model_path()


def test_a_missing_extra_says_how_to_get_it(monkeypatch, cache_dir):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "diptych\[demo\]"'):
        demo.demo_model_path()


def test_an_unwritable_cache_is_named(install, tmp_path, monkeypatch):
    install(StandIn())
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(blocker / "below"))
    with pytest.raises(ConfigError, match=r"cannot assemble the demo model at .*set DIPTYCH_CACHE_DIR"):
        demo.demo_model_path()


def test_the_real_one_is_what_we_pin(demo_model):
    assert demo_model.read_bytes()[:4] == b"GGUF"
    assert demo_model.stat().st_size > 200_000_000
