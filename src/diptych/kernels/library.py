"""The loaded kernel library: which instruction set it uses, with how many threads, and the types of its functions.

`kernels()` is None where there is no compiler or the user has switched them off; every caller then takes the torch
reference. ctypes releases the GIL for the length of a call.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from diptych import env
from diptych.errors import ConfigError
from diptych.kernels.build import BuildError, kernel_library

logger = logging.getLogger(__name__)

FASTEST_FIRST = ("amx", "avx512", "avx2", "portable")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the library calls a dtype."""

_SIGNATURES: dict[str, tuple[type | None, list[Any]]] = {
    "use_kernels": (c_int32, [c_char_p]),
    "kernels_name": (c_char_p, []),
    "set_num_threads": (None, [c_int32, POINTER(c_int32)]),
    "num_threads": (c_int32, []),
    "rms_norm": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "add_normalized": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "add_then_norm": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64]),
    "norm_and_rotate": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "linear": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "linear_argmax": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "pack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64]),
    "gguf_block_nbytes": (c_int64, [c_int32, c_int64]),
    "gguf_pack": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32]),
    "embed_packed": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int32]),
    "attention": (None, [c_void_p, c_void_p, c_void_p]),
    "decoder_layers": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p]),
    "adapter_addend": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64]),
    "argmax": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "shm_nbytes": (c_int64, [c_int32, c_int64]),
    "shm_open": (c_void_p, [c_int32, c_int32, c_int32, c_int64, c_uint64, c_int32, c_int64, c_int64]),
    "shm_sees_all": (c_int32, [c_void_p]),
    "shm_close": (None, [c_void_p]),
    "shm_allreduce": (c_int64, [c_void_p, c_void_p, c_void_p, c_int64, c_int32]),
    "shm_allgather": (c_int64, [c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "shm_barrier": (c_int64, [c_void_p]),
}


class Kernels:
    """The library's functions as attributes, by their names without prefix; csrc/library.cpp says what they do."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = library[f"diptych_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._FuncPointer:
        raise AttributeError(f"the kernel library has no function {name!r}")

    @property
    def instruction_set(self) -> str:
        """Name of the set in use."""
        return self.kernels_name().decode()

    def use(self, instruction_set: str) -> bool:
        """Use the kernels of this set from now on; False, and no change, if they cannot run here."""
        return self.use_kernels(instruction_set.encode()) == 0


@cache
def kernels() -> Kernels | None:
    """The library, loaded and set up at the first call; None if it cannot be had. Says which, once.

    Raises: ConfigError if DIPTYCH_KERNELS names an instruction set that cannot run here.
    """
    wanted = env.kernels()
    if wanted == "off":
        logger.info("CPU kernels are off: torch computes")
        return None
    try:
        found = Kernels(ctypes.CDLL(str(kernel_library(sanitize=env.sanitize_kernels()))))
    except (BuildError, OSError) as error:
        logger.warning("no CPU kernels, torch computes instead (several times slower): %s", error)
        return None
    candidates = FASTEST_FIRST if wanted is None else (wanted,)
    if not any(found.use(name) for name in candidates):
        raise ConfigError(f"DIPTYCH_KERNELS is {wanted!r}, which cannot run here; use off, or one of {FASTEST_FIRST}")
    found.set_num_threads(torch.get_num_threads(), None)
    logger.info("CPU kernels: %s, %d threads", found.instruction_set, found.num_threads())
    return found


def set_num_threads(count: int, *, cpus: list[int] | None = None) -> None:
    """Threads that share a kernel's work, the caller included.

    Args: cpus: one core a thread to pin the helpers to; the caller's own entry is ignored, it pins itself.
    """
    library = kernels()
    if library is not None:
        library.set_num_threads(count, None if cpus is None else (c_int32 * count)(*cpus))
