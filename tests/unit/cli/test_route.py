"""The command line of the router."""

from __future__ import annotations

import pytest

from diptych.cli.flags import flag_names
from diptych.cli.route import parse
from diptych.errors import ConfigError
from diptych.router.config import EngineAddress, Role, RouterConfig

FLAGS = [
    "--host",
    "--port",
    "--policy",
    "--local-prefill-tokens",
    "--learn-local-prefill",
    "--api-key",
    "--admin-api-key",
    "--engine-api-key",
    "--max-attempts",
    "--connect-timeout",
    "--health-interval",
    "--health-timeout",
    "--health-failures",
    "--breaker-failures",
    "--breaker-pause",
    "--max-active-requests",
    "--drain-timeout",
    "--max-body-size",
    "--log-level",
    "--log-requests",
]


def test_flags_are_the_frozen_ones():
    assert [name for name in flag_names(RouterConfig) if name != "--engines"] == FLAGS


def test_engines_have_roles_and_ports():
    arguments = [
        "http://u:1",
        "--prefill",
        "http://p:1",
        "8999",
        "--prefill",
        "p:2",
        "--decode",
        "d:1",
        "--decode",
        "d:2",
    ]
    assert parse([*arguments, "--policy", "prefix_aware"]) == RouterConfig(
        policy="prefix_aware",
        engines=(
            EngineAddress(url="http://u:1"),
            EngineAddress(url="http://p:1", role=Role.PREFILL, bootstrap_port=8999),
            EngineAddress(url="http://p:2", role=Role.PREFILL),
            EngineAddress(url="http://d:1", role=Role.DECODE),
            EngineAddress(url="http://d:2", role=Role.DECODE),
        ),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--polcy", "random"], "did you mean --policy?"),
        (["--policy", "best"], "invalid choice 'best'"),
        (["--decode", "d:1", "8998"], "--decode takes one URL"),
        (["--prefill", "p", "q"], "--prefill takes a URL and perhaps its bootstrap port"),
        (["--prefill", "ftp://p"], "an engine must be a URL"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(arguments, message):
    with pytest.raises(ConfigError) as raised:
        parse(arguments)
    assert message in str(raised.value)
