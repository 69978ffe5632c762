"""Shared by every test: a cache folder of their own, and no environment of the person who runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych import env


@pytest.fixture(autouse=True)
def _no_keys_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
    monkeypatch.delenv("DIPTYCH_CLUSTER_KEY", raising=False)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that Diptych uses in this test."""
    folder = tmp_path / "cache"
    compiled = env.cache_dir() / "kernels"  # shared with it: compiling them takes half a minute
    compiled.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "kernels").symlink_to(compiled)
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, assembled once for all runs; the `demo` extra is a test dependency."""
    from diptych.demo import demo_model_path

    return demo_model_path()
