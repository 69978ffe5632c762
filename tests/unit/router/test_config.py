"""The router's configuration: what is refused, and how names become engines."""

from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from diptych.router.config import EngineAddress, Role, RouterConfig, engine_address, resolve_router


def test_retries_delay_a_request_by_less_than_two_seconds():
    assert resolve_router(RouterConfig()).added_delay_s < 2.0
    with pytest.raises(ConfigError, match="max_attempts 9 and connect_timeout"):
        resolve_router(RouterConfig(max_attempts=9))


@pytest.mark.parametrize(
    "settings",
    [
        {"host": ""},
        {"port": 70000},
        {"max_attempts": 0},
        {"health_failures": 0},
        {"health_interval": 0.0},
        {"connect_timeout": float("nan")},
        {"local_prefill_tokens": -1},
        {"drain_timeout": -1.0},
        {"max_body_size": "big"},
        {"api_key": ""},
        {"engines": (EngineAddress(url="http://a"), EngineAddress(url="http://a"))},
    ],
)
def test_a_bad_value_is_named(settings):
    with pytest.raises(ConfigError, match="http://a" if "engines" in settings else next(iter(settings))):
        resolve_router(RouterConfig(**settings))


def test_the_api_key_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DIPTYCH_API_KEY", "k")
    assert resolve_router(RouterConfig()).api_key == "k"


@pytest.mark.parametrize(
    ("text", "url", "host"),
    [
        ("http://a:1/", "http://a:1", "a"),
        ("a:1", "http://a:1", "a"),
        ("https://[::1]:2/base", "https://[::1]:2/base", "::1"),
    ],
)
def test_engines_are_urls(text, url, host):
    address = engine_address(text, Role.PREFILL, 8998)
    assert (address.url, address.bootstrap_host) == (url, host)


@pytest.mark.parametrize("text", ["", "http://", "ftp://a", "http://a?x=1", "http://u@a", "http://a:b", "http://a:0"])
def test_what_is_no_url_is_refused(text):
    with pytest.raises(ConfigError, match="must be a URL"):
        engine_address(text)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_loopback(host, expected):
    assert RouterConfig(host=host).is_loopback is expected
