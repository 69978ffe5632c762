"""`diptych serve [MODEL]`: resolves the config and hands it to the server."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.cli.flags import EngineFlags, parse_engine_flags
from diptych.log import setup_logging
from diptych.resolve import resolve

DESCRIPTION = "Serve a model over HTTP with an OpenAI-compatible API. Without MODEL: the demo model."


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. On a node that is not the first: only compute.

    Raises: ConfigError before anything is started.
    """
    config = parse_engine_flags(EngineFlags, arguments, prog="diptych serve", description=DESCRIPTION).engine
    setup_logging("server", config.server.log_level)
    config = resolve(config)
    if config.parallel.node_rank:
        from diptych.engine.node import run_node

        return run_node(config)
    # Imported only now: the web framework takes longer to import than --help may take.
    from diptych.server.app import serve

    return serve(config)
