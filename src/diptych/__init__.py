"""Diptych: an LLM serving engine. The public names, loaded on first use so that `import diptych` stays light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
    from diptych.core.request import SamplingParams
    from diptych.offline import LLM, Engine

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "ServerConfig",
    "__version__",
]

_OWNERS = {
    "LLM": "diptych.offline",
    "Engine": "diptych.offline",
    "SamplingParams": "diptych.core.request",
    "CacheConfig": "diptych.config",
    "EngineConfig": "diptych.config",
    "ModelConfig": "diptych.config",
    "SchedulerConfig": "diptych.config",
    "ServerConfig": "diptych.config",
}


def __getattr__(name: str) -> object:
    owner = _OWNERS.get(name)
    if owner is None:
        raise AttributeError(f"module 'diptych' has no attribute {name!r}")
    return getattr(importlib.import_module(owner), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
