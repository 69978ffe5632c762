"""Rotary frequencies of a model: the plain ones and their scalings to longer contexts.

Pure arithmetic on small CPU tensors, done once when a model is built. `layers.rotary` applies the result.
"""

from __future__ import annotations

import math

import torch

from diptych.models.config import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 [D / 2] on the CPU, and the factor on cosines and sines (1 except for YaRN)."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
    if scaling is None:
        return frequencies, 1.0
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor, 1.0
        case "llama3":
            return _llama3_frequencies(frequencies, scaling), 1.0
        case "yarn":
            return _yarn_frequencies(frequencies, theta, scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated smoothly."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp_(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn_frequencies(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071): interpolation by parts, and a larger magnitude."""
    head_dim = 2 * frequencies.numel()

    def dimension_of(num_turns: float) -> float:
        """The (fractional) dimension that turns this often within the original context."""
        wavelength = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_of(scaling.beta_slow)), head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp_(0.0, 1.0)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies / scaling.factor * interpolated + frequencies * (1 - interpolated), magnitude
