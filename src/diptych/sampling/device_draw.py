"""Draws on a CUDA device, launched without waiting for it. Owns their scratch memory. Needs Triton."""

from __future__ import annotations

import torch

from diptych.kernels.cuda.sampling import new_workspace, sample_rows
from diptych.sampling.truncation import SamplingRows


class DeviceDraw:
    """Chooses tokens for at most `max_rows` rows at a time, greedy ones among them."""

    def __init__(self, vocab_size: int, max_rows: int, *, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._workspace = new_workspace(max_rows, vocab_size, device=device)

    def draw(self, logits: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
        """One token a row, -1 where the row's maximum is not finite: int64 [R], still to be computed.

        Args: logits: [R, V], any float dtype, not modified. sampling: of all rows in order; temperature 0 is greedy.
        """
        num_rows = logits.shape[0]
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        # torch keeps pinned memory for reuse until the copies that read it are done.
        host = torch.empty(5, num_rows, dtype=torch.float64, pin_memory=True)
        numbers = host.numpy()
        numbers[0] = sampling.temperature
        numbers[1] = sampling.top_k.clip(0, self._vocab_size)
        numbers[2] = sampling.top_p
        numbers[3] = sampling.min_p
        numbers[4] = sampling.noise
        temperature, top_k, top_p, min_p, noise = host.to(self._device, non_blocking=True)
        sample_rows(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            noise=noise,
            out=token_ids,
            workspace=self._workspace,
        )
        return token_ids
