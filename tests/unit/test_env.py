"""Environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych import env
from diptych.errors import ConfigError


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


LWS_NAMES = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")


@pytest.fixture
def no_leader_worker_set(monkeypatch):
    for name in LWS_NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_leader_worker_set")
def test_leader_worker_set_is_read_whole_or_not_at_all(monkeypatch):
    assert env.leader_worker_set() is None
    for name, value in zip(LWS_NAMES, ("leader.pods", "4", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert env.leader_worker_set() == env.LeaderWorkerSet("leader.pods", 4, 0)
    monkeypatch.setenv("LWS_GROUP_SIZE", "four")
    with pytest.raises(ConfigError, match="LWS_GROUP_SIZE is 'four'"):
        env.leader_worker_set()
    monkeypatch.delenv("LWS_GROUP_SIZE")
    with pytest.raises(ConfigError, match="LWS_GROUP_SIZE is not set though others"):
        env.leader_worker_set()
