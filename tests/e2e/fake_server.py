"""A whole `diptych serve` on the scripted engine, as a process: `python fake_server.py PORT TOKENIZER_FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from diptych.config import EngineConfig, ModelConfig, ServerConfig
from diptych.log import setup_logging
from diptych.server.app import serve

FAKE_ENGINE = Path(__file__).parents[1] / "unit" / "server" / "fake_engine.py"

if __name__ == "__main__":
    setup_logging("server", "warning")
    config = EngineConfig(
        model=ModelConfig(model_path=sys.argv[2]),
        server=ServerConfig(port=int(sys.argv[1]), served_model_name="fake", log_requests=False, drain_timeout=5.0),
    )
    sys.exit(serve(config, engine_command=(sys.executable, str(FAKE_ENGINE))))
