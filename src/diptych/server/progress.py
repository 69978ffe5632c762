"""What a person sees while the engine loads and when it is ready: a bar on a terminal, lines in a log otherwise."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

import diptych
from diptych.config import ServerConfig
from diptych.core.messages import EngineInfo, Loading

logger = logging.getLogger(__name__)

_LOG_STEP_PERCENT = 10
_LOG_INTERVAL_S = 2.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}


class LoadingReport:
    """Shows loading progress until it is left. Use as a context manager; pass it to the engine's client."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._tasks: dict[str, TaskID] = {}
        self._logged: dict[str, int] = {}
        self._logged_at = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self._is_terminal,
        )

    def __enter__(self) -> LoadingReport:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, loading: Loading) -> None:
        """The engine has come this far."""
        if self._is_terminal:
            task = self._tasks.get(loading.what)
            if task is None:
                task = self._tasks[loading.what] = self._bar.add_task(loading.what, total=loading.total)
            self._bar.update(task, completed=loading.done, total=loading.total)
            return
        percent = 100 * loading.done // loading.total if loading.total else 100
        step = percent - percent % _LOG_STEP_PERCENT
        is_due = percent == 100 or time.monotonic() - self._logged_at > _LOG_INTERVAL_S
        if is_due and step > self._logged.get(loading.what, -1):
            self._logged[loading.what], self._logged_at = step, time.monotonic()
            logger.info("%s: %d%%", loading.what, percent)


def base_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    shown = _EVERY_ADDRESS.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def banner(info: EngineInfo, config: ServerConfig, model_name: str, port: int) -> str:
    """What is served where, what fits, and a command to try."""
    nbytes = info.num_pages * info.page_nbytes
    url = base_url(config.host, port)
    role = [] if info.peer is None else [f"  role      {info.peer.role}; peers reach it at {info.peer.address}"]
    return "\n".join(
        (
            f"Diptych {diptych.__version__} serves {model_name} at {url}",
            *role,
            f"  model     {info.model_path}",
            f"            {info.architecture}, {info.dtype}, {info.device}; loaded in {info.load_s:.1f} s",
            f"  KV cache  {info.num_kv_tokens:,} tokens ({nbytes / 2**30:.2f} GiB); context {info.max_model_len:,}",
            _example(config, model_name, url),
        )
    )


def cluster_banner(
    config: ServerConfig, model_name: str, port: int, *, model: str, engines: Sequence[tuple[str, str]]
) -> str:
    """What a router serves where, with which engines (name and URL), and a command to try."""
    url = base_url(config.host, port)
    return "\n".join(
        (
            f"Diptych {diptych.__version__} serves {model_name} at {url}, prefill and decode apart",
            f"  model     {model}",
            *(f"  {name:<9} {engine_url}" for name, engine_url in engines),
            _example(config, model_name, url),
        )
    )


def _example(config: ServerConfig, model_name: str, url: str) -> str:
    body = json.dumps({"model": model_name, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0})
    headers = "-H 'Content-Type: application/json'"
    if config.api_key:
        headers += ' -H "Authorization: Bearer $DIPTYCH_API_KEY"'
    return f"  try       curl {url}/v1/completions {headers} -d {shlex.quote(body)}"
