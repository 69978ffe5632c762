"""The attention backends by name, and the choice of one. A backend's module is imported only when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from diptych.attention.backend import AttentionBackend
from diptych.errors import ConfigError
from diptych.kernels.library import kernels
from diptych.kv.pool import KVPool

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Where a backend's class is, which is called with the pool, and the types of device that it runs on."""

    module: str
    attribute: str
    devices: tuple[str, ...]


BACKENDS: dict[str, BackendEntry] = {
    "flashinfer": BackendEntry("diptych.attention.flashinfer", "FlashInferAttention", ("cuda",)),
    "cpu": BackendEntry("diptych.attention.cpu", "CPUAttention", ("cpu",)),
    "reference": BackendEntry("diptych.attention.reference", "ReferenceAttention", ("cuda", "cpu")),
}
"""Backends by name, fastest first."""


def resolve_attention(name: str, device_type: str = "cpu", *, itemsize: int = 2, is_latent: bool = False) -> str:
    """The name of a backend, "auto" resolved to the fastest one that runs. Raises ConfigError for an unknown name.

    Args: itemsize: bytes of one element of the KV pool. is_latent: the pool keeps latent rows.
    """
    if is_latent and name == "flashinfer":
        raise ConfigError("attention backend 'flashinfer' has no latent attention (MLA) yet; use 'auto' or 'reference'")
    if name == AUTO and device_type == "cuda":
        has_kernels = find_spec("flashinfer") is not None and find_spec("triton") is not None
        return "flashinfer" if has_kernels and itemsize == 2 and not is_latent else "reference"
    if name == AUTO:
        return "cpu" if device_type == "cpu" and kernels() is not None else "reference"
    if name not in BACKENDS:
        known = ", ".join((AUTO, *BACKENDS))
        raise ConfigError(f"attention backend {name!r} is not known; use one of {known}")
    return name


def create_attention(name: str, pool: KVPool) -> AttentionBackend:
    """The backend called `name` over `pool`. Raises ConfigError for an unknown name."""
    resolved = resolve_attention(
        name, pool.tensor.device.type, itemsize=pool.tensor.element_size(), is_latent=pool.layout.is_latent
    )
    entry = BACKENDS[resolved]
    try:
        backend = vars(import_module(entry.module))[entry.attribute]
    except ImportError as error:
        raise ConfigError(
            f"attention backend {resolved!r} cannot be loaded ({error}); use 'auto', or install it"
        ) from error
    return cast(AttentionBackend, backend(pool))
