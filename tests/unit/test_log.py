"""The one log format."""

from __future__ import annotations

import logging
import re

import pytest

from diptych.log import ProcessFormatter, setup_logging


def line(message: str, **extra: object) -> str:
    record = logging.makeLogRecord({"name": "diptych.server.app", "levelname": "INFO", "msg": message, **extra})
    return ProcessFormatter("worker/1").format(record)


def test_a_line_has_time_level_process_and_logger():
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    worker/1 diptych\.server\.app: ready"
    assert re.fullmatch(pattern, line("ready"))


def test_a_request_is_named_once():
    assert line("done", request_id="r-1").endswith("done request_id=r-1")
    assert line("done request_id=r-1", request_id="r-1").count("request_id=") == 1


@pytest.fixture
def _restore_logging():
    root, own = logging.getLogger(), logging.getLogger("diptych")
    handlers, level, own_level = root.handlers[:], root.level, own.level
    root.handlers[:] = []
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    own.setLevel(own_level)


@pytest.mark.usefixtures("_restore_logging")
def test_setup_hears_us_from_the_level_and_others_from_warning(capsys):
    setup_logging("engine", "warning")
    setup_logging("worker", "debug", 3)
    logging.getLogger("diptych.kv").debug("ours")
    logging.getLogger("some_library").info("theirs")
    logging.getLogger("some_library").warning("their warning")
    err = capsys.readouterr().err
    assert "worker/3 diptych.kv: ours" in err
    assert "their warning" in err
    assert len(err.splitlines()) == 2
