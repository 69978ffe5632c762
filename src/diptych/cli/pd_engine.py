"""One engine of `diptych pd` with its server, as a child: `python -m diptych.cli.pd_engine --ready-fd N`.

Its configuration comes as JSON on standard input. Once it serves, it writes one line of JSON, an `EngineReady`, to the
descriptor and closes it; whatever else it says goes to its log.
"""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from diptych.cli.main import guarded
from diptych.config import EngineConfig
from diptych.log import setup_logging
from diptych.server.app import serve
from diptych.server.process import ENGINE_COMMAND
from diptych.server.state import ServerState


class EngineReady(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine serves, and what."""

    port: int
    model_name: str
    architecture: str
    dtype: str
    device: str


def run(config: EngineConfig, ready_fd: int, *, engine_command: tuple[str, ...] = ENGINE_COMMAND) -> int:
    """Serve until SIGTERM. Returns the exit status. Raises: ConfigError."""
    setup_logging("server", config.server.log_level)

    def on_ready(state: ServerState, port: int) -> None:
        info = state.ready_info
        ready = EngineReady(
            port=port,
            model_name=state.model_name,
            architecture=info.architecture,
            dtype=info.dtype,
            device=info.device,
        )
        with os.fdopen(ready_fd, "wb") as file:
            file.write(msgspec.json.encode(ready) + b"\n")

    return serve(config, engine_command=engine_command, on_ready=on_ready)


def main(engine_command: tuple[str, ...] = ENGINE_COMMAND) -> int:
    """Read the command line and the configuration, and serve. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="diptych.cli.pd_engine")
    parser.add_argument("--ready-fd", type=int, required=True, help="descriptor that is told where it serves")
    arguments = parser.parse_args()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    return guarded(lambda: run(config, arguments.ready_fd, engine_command=engine_command))


if __name__ == "__main__":
    sys.exit(main())
