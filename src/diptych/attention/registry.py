"""The attention backends by name, and the choice of one. A backend's module is imported only when it is made."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from diptych.attention.backend import AttentionBackend
from diptych.errors import ConfigError
from diptych.kernels.library import kernels
from diptych.kv.pool import KVPool

AUTO = "auto"

BACKENDS: dict[str, tuple[str, str]] = {
    "cpu": ("diptych.attention.cpu", "CPUAttention"),
    "reference": ("diptych.attention.reference", "ReferenceAttention"),
}
"""Name to module and class, fastest first; the class is called with the pool."""


def resolve_attention(name: str, device_type: str = "cpu") -> str:
    """The name of a backend, "auto" resolved to the fastest one that runs. Raises ConfigError for an unknown name."""
    if name == AUTO:
        return "cpu" if device_type == "cpu" and kernels() is not None else "reference"
    if name not in BACKENDS:
        known = ", ".join((AUTO, *BACKENDS))
        raise ConfigError(f"attention backend {name!r} is not known; use one of {known}")
    return name


def create_attention(name: str, pool: KVPool) -> AttentionBackend:
    """The backend called `name` over `pool`. Raises ConfigError for an unknown name."""
    module, attribute = BACKENDS[resolve_attention(name, pool.tensor.device.type)]
    return cast(AttentionBackend, vars(import_module(module))[attribute](pool))
