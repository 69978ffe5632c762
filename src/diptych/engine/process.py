"""Entry point of an engine's own process: `python -m diptych.engine.process --endpoint ipc://...`.

The configuration comes as JSON on standard input; whoever started us holds the other end of the endpoint.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from diptych.config import EngineConfig
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import FromEngine, ToEngine
from diptych.engine.engine import EngineCore
from diptych.engine.multi_process import create_executor
from diptych.log import setup_logging

# The worker's thread needs the interpreter for moments between kernels; with Python's own 5 ms it would wait that long
# for whichever thread has it.
SWITCH_INTERVAL_S = 0.0002


def main() -> int:
    """Run an engine until its server drains it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="diptych.engine.process")
    parser.add_argument("--endpoint", required=True, help="ZMQ endpoint bound by the server")
    arguments = parser.parse_args()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    setup_logging("engine", config.server.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Ctrl-C reaches the whole terminal group; only the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel: Channel[FromEngine, ToEngine] = Channel(open_socket(context, arguments.endpoint, bind=False), ToEngine)
    try:
        # Sockets of ranks go where the server's is, which removes the folder even after a kill.
        folder = Path(arguments.endpoint.removeprefix("ipc://")).parent
        return EngineCore(config, create_executor(config, folder), channel).run()
    finally:
        context.term()


if __name__ == "__main__":
    sys.exit(main())
