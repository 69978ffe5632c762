"""Diptych: an LLM serving engine. The public names, loaded on first use so that `import diptych` stays light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
    from diptych.core.request import SamplingParams
    from diptych.models.named_tensors import FlattenedBucket
    from diptych.offline import LLM, Engine
    from diptych.parallel.weights_group import WeightsGroup

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "FlattenedBucket",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "ServerConfig",
    "WeightsGroup",
    "__version__",
]

_OWNERS = {
    "LLM": "diptych.offline",
    "Engine": "diptych.offline",
    "FlattenedBucket": "diptych.models.named_tensors",
    "SamplingParams": "diptych.core.request",
    "WeightsGroup": "diptych.parallel.weights_group",
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
