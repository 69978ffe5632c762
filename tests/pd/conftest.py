"""Fixtures: engines as processes, toy or real; all are ended with the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from engines import TOY_ENGINE, EngineUnderTest

from diptych.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig


@pytest.fixture
def start_engine() -> Iterator[Callable[..., EngineUnderTest]]:
    """Starts toy engines; all are ended with the test."""
    engines: list[EngineUnderTest] = []

    def start(role: str, *, environment: dict[str, str] | None = None, page_size: int = 4, **options: object):
        transfer_fields = set(TransferConfig.__dataclass_fields__)
        transfer = TransferConfig(role=role, **{k: v for k, v in options.items() if k in transfer_fields})
        scheduler = SchedulerConfig(
            check_invariants=True, **{k: v for k, v in options.items() if k not in transfer_fields}
        )
        config = replace(EngineConfig(), transfer=transfer, scheduler=scheduler, cache=CacheConfig(page_size=page_size))
        engine = EngineUnderTest(role, [sys.executable, str(TOY_ENGINE)], config, environment or {})
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def start_real() -> Iterator[Callable[[EngineConfig], EngineUnderTest]]:
    """Starts engines with real models; all are ended with the test."""
    engines: list[EngineUnderTest] = []

    def start(config: EngineConfig) -> EngineUnderTest:
        command = [sys.executable, "-m", "diptych.engine.process"]
        engines.append(EngineUnderTest(config.transfer.role, command, config, {"OMP_NUM_THREADS": "1"}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
