"""What depends on how a kernel is launched: programmatic dependent launch (PDL), and the absence of a GPU.

With PDL a kernel may start while the one before it in the stream drains; it must then wait before it touches anything
that another kernel has written. Every kernel of this package calls `wait_for_inputs` once, before its first access to
anything but weights, and is launched with it where
`supports_dependent_launch`.

Triton compiles a kernel again for pointers that are not aligned to 16 bytes. Pointers to a step's numbers come out of
one upload and are aligned by chance, so kernels declare that they do not care: nothing is compiled while serving.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few elsewhere, where the kernels run in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before the one in front of them has finished: on Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs():
    """Wait for the kernels before this one, and let the next one start to wait; does nothing without PDL."""
    if tl.target_info.cuda_capability_geq(9, 0):  # False in the interpreter
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
