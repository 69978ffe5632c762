"""Reductions over the vocabulary in one pass a row. R = rows, V = vocabulary."""

from __future__ import annotations

import torch

from diptych.kernels.library import kernels


def argmax_rows(logits: torch.Tensor) -> torch.Tensor | None:
    """Lowest index of each row's largest value, int64 [R]; the first NaN's index if there is one. None where there is
    no kernel for it.

    Args: logits: float32 [R, V] on the CPU, rows contiguous.
    """
    library = kernels()
    if library is None or logits.stride(1) != 1:
        return None
    indices = torch.empty(logits.shape[0], dtype=torch.int64)
    library.argmax(indices.data_ptr(), logits.data_ptr(), logits.shape[0], logits.shape[1], logits.stride(0))
    return indices
