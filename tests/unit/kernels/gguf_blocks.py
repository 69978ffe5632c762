"""Random blocks of every quantised GGUF format, valid ones with any codes and scales of a chosen size."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from diptych.kernels.gguf_linear import StoredBlocks

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where the float16 scales of a block are; every other byte may be anything."""

KINDS = tuple(HALVES)


def block_len(kind: str) -> int:
    """Inputs of one block."""
    return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


def random_rows(kind: str, outputs: int, inputs: int, *, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """A tensor's bytes, [outputs, bytes of a row]. scale: standard deviation of the float16 scales."""
    generator = np.random.default_rng(seed)
    length, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (outputs, inputs // length, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (generator.standard_normal(blocks.shape[:2]) * scale).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def dequantised(kind: str, rows: np.ndarray) -> torch.Tensor:
    """What the gguf library makes of them, float32 [outputs, inputs]."""
    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[kind]).copy())


def stored(kind: str, rows: np.ndarray, inputs: int, *, order: np.ndarray | None = None) -> StoredBlocks:
    """The same for a kernel."""
    return StoredBlocks(
        rows=rows,
        kind=int(GGMLQuantizationType[kind]),
        in_features=inputs,
        order=np.arange(len(rows)) if order is None else order,
        release=lambda: None,
    )
