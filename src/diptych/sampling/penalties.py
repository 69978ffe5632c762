"""Adjustments of logits that depend on a request's own tokens: repetition, presence and frequency penalties, and bias.

Owns per-slot token lists and counts, allocated only for slots that use them. Knows nothing of how a token is chosen.
All work is proportional to a sequence's length, not to the vocabulary. R = rows of the batch, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from diptych.core.request import SamplingParams
from diptych.errors import RequestError

_GROWTH = 256


@dataclass(slots=True)
class _PenaltySlot:
    """counts_row: row in the table of output counts. seen: int64 buffer of tokens a penalty may touch, with repeats."""

    sampling: SamplingParams
    counts_row: int
    seen: torch.Tensor
    num_seen: int


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


class Penalties:
    """Repetition penalty over prompt and output, presence and frequency penalties over the output."""

    def __init__(self, vocab_size: int, *, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, _PenaltySlot] = {}
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free_rows: list[int] = []

    def admit(self, slot: int, sampling: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Bind a slot; tokens beyond the prompt count as output."""
        prompt = token_ids[:num_prompt_tokens] if sampling.repetition_penalty != 1.0 else []
        output = [token for token in token_ids[num_prompt_tokens:] if 0 <= token < self._vocab_size]
        unique = np.unique(np.asarray(prompt, dtype=np.int64))
        unique = unique[(unique >= 0) & (unique < self._vocab_size)]
        known = torch.from_numpy(np.concatenate([unique, np.asarray(output, dtype=np.int64)]))
        seen = torch.empty(len(known) + _GROWTH, dtype=torch.int64, device=self._device)
        seen[: len(known)] = known
        row = self._take_counts_row()
        if output:
            self._counts[row] = torch.bincount(torch.tensor(output), minlength=self._vocab_size)
        self._slots[slot] = _PenaltySlot(sampling, row, seen, len(known))

    def release(self, slot: int) -> None:
        """Free a slot; one without penalties is ignored."""
        entry = self._slots.pop(slot, None)
        if entry is not None:
            self._counts[entry.counts_row, entry.seen[: entry.num_seen]] = 0
            self._free_rows.append(entry.counts_row)

    def apply(self, logits: torch.Tensor, rows: list[int], slots: list[int]) -> None:
        """Penalise rows of logits [R, V] in place. Args: rows, slots: parallel, every slot admitted here."""
        entries = [self._slots[slot] for slot in slots]
        lengths = torch.tensor([entry.num_seen for entry in entries], device=self._device)
        ids = torch.cat([entry.seen[: entry.num_seen] for entry in entries])
        numel = len(ids)

        def spread(values: list[float] | list[int]) -> torch.Tensor:
            return torch.repeat_interleave(torch.tensor(values, device=self._device), lengths, output_size=numel)

        row_of = spread(rows)
        count = self._counts[spread([entry.counts_row for entry in entries]), ids]
        repetition = spread([entry.sampling.repetition_penalty for entry in entries])
        value = logits[row_of, ids]
        value = torch.where(value > 0, value / repetition, value * repetition)
        value -= spread([entry.sampling.frequency_penalty for entry in entries]) * count
        value -= spread([entry.sampling.presence_penalty for entry in entries]) * (count > 0)
        logits[row_of, ids] = value  # a token listed twice gets the same value twice

    def record(self, slots: list[int], token_ids: torch.Tensor) -> None:
        """Count the tokens just sampled. Args: token_ids: int64 [len(slots)] on the device."""
        for place, slot in enumerate(slots):
            entry = self._slots[slot]
            if entry.num_seen == len(entry.seen):
                grown = torch.empty(2 * len(entry.seen), dtype=torch.int64, device=self._device)
                grown[: entry.num_seen] = entry.seen
                entry.seen = grown
            entry.seen[entry.num_seen] = token_ids[place]
            entry.num_seen += 1
        counts_rows = torch.tensor([self._slots[slot].counts_row for slot in slots], device=self._device)
        self._counts[counts_rows, token_ids] += 1  # the rows differ, so no index occurs twice

    def _take_counts_row(self) -> int:
        if not self._free_rows:
            size = len(self._counts)
            grown = torch.zeros(max(1, 2 * size), self._vocab_size, dtype=torch.int32, device=self._device)
            grown[:size] = self._counts
            self._counts = grown
            self._free_rows = list(range(size, len(grown)))
        return self._free_rows.pop()


class LogitBias:
    """Per-slot constants added to the logits of some tokens."""

    def __init__(self, vocab_size: int, *, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def admit(self, slot: int, bias: dict[int, float]) -> None:
        """Bind a slot. Raises RequestError for a token id outside the vocabulary."""
        for token_id in bias:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"logit_bias names token {token_id}, but the vocabulary has {self._vocab_size}", param="logit_bias"
                )
        ids = torch.tensor(list(bias.keys()), dtype=torch.int64, device=self._device)
        values = torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device)
        self._slots[slot] = (ids, values)

    def release(self, slot: int) -> None:
        """Free a slot; one without bias is ignored."""
        self._slots.pop(slot, None)

    def apply(self, logits: torch.Tensor, rows: list[int], slots: list[int]) -> None:
        """Add the slots' biases to rows of logits [R, V] in place. Args: rows, slots: parallel."""
        for row, slot in zip(rows, slots, strict=True):
            ids, values = self._slots[slot]
            logits[row].index_add_(0, ids, values)
