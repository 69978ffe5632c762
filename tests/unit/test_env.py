"""Environment variables."""

from __future__ import annotations

from pathlib import Path

from diptych import env


def test_cache_dir_prefers_ours_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "ours"
    monkeypatch.delenv("DIPTYCH_CACHE_DIR")
    assert env.cache_dir() == tmp_path / "xdg" / "diptych"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == Path(tmp_path, ".cache", "diptych")


def test_an_empty_api_key_is_none(monkeypatch):
    monkeypatch.setenv("DIPTYCH_API_KEY", "")
    assert env.api_key() is None
    monkeypatch.setenv("DIPTYCH_API_KEY", "secret")
    assert env.api_key() == "secret"


def test_an_empty_cluster_key_is_none(monkeypatch):
    monkeypatch.setenv("DIPTYCH_CLUSTER_KEY", "")
    assert env.cluster_key() is None
    monkeypatch.setenv("DIPTYCH_CLUSTER_KEY", "secret")
    assert env.cluster_key() == "secret"
