"""Logging of a process that Diptych owns: one handler on standard error, one format.

Modules do `logger = logging.getLogger(__name__)` and pass `extra={"request_id": ...}` on lines about one request. As a
library (`diptych.LLM`) Diptych configures nothing.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process_name)s %(name)s: %(message)s"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class ProcessFormatter(logging.Formatter):
    """Time, level, process, logger and text; then `request_id=` where the line carries one and does not say it yet.

    Args: process_name: which of our processes writes, such as "server" or "worker/1".
    """

    def __init__(self, process_name: str) -> None:
        super().__init__(_FORMAT, _TIME_FORMAT)
        self._process_name = process_name

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.__dict__["process_name"] = self._process_name
        line = super().formatMessage(record)
        request_id = record.__dict__.get("request_id")
        if request_id is None or f"request_id={request_id}" in line:
            return line
        return f"{line} request_id={request_id}"


def setup_logging(process: str, level: str, rank: int | None = None) -> None:
    """Send this process's log to standard error; a later call replaces an earlier one's effect.

    Args: process: "server", "engine" or "worker". level: "debug", "info", "warning" or "error", for Diptych's own
    loggers; other libraries are heard from "warning" up. rank: of a worker.
    """
    name = process if rank is None else f"{process}/{rank}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ProcessFormatter(name))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diptych").setLevel(level.upper())
