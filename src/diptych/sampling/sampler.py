"""The slot table of sampling: what each running request asked for, and the order in which it is applied to its logits.

Owns per-slot state (position, counts, grammar) and the order of operations. Knows nothing of sequences, pages or steps.
Used on the worker's thread only. R = rows of the batch, V = vocabulary; rows that ask for nothing beyond the likeliest
token cost one argmax over the batch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.core.batch import TokenLogprobs
from diptych.core.request import SamplingParams
from diptych.errors import RequestError, Unsupported
from diptych.sampling.choice import TokenChoice
from diptych.sampling.grammar import GrammarCompiler, PendingMask
from diptych.sampling.grammar_check import validate_grammar
from diptych.sampling.logprobs import output_logprobs, wants_logprobs
from diptych.sampling.penalties import LogitBias, Penalties, has_penalties

UNSOUND = "the model's logits are not finite, or nothing is left to choose from; the request cannot go on"


class _Feature(enum.IntFlag):
    """What a slot needs beyond an argmax."""

    RANDOM = 1
    LOGPROBS = 2
    BIAS = 4
    PENALTIES = 8
    MIN_TOKENS = 16
    GRAMMAR = 32
    ADJUSTS = BIAS | PENALTIES | MIN_TOKENS | GRAMMAR


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Result of one call, one entry a row.

    token_ids: int64 [R] on the device; 0 where there is an error. logprobs: for rows that asked. errors: why a row has
    no token, else None.
    """

    token_ids: torch.Tensor
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


@dataclass(slots=True)
class _Slot:
    """sampling: as asked. banned: ids that min_tokens holds back. mask: the grammar's."""

    sampling: SamplingParams
    banned: torch.Tensor | None = None
    mask: PendingMask | None = None


class Sampler:
    """Chooses the next token of every row.

    Args: vocab_size: columns of the logits. max_slots: slots are 0 .. max_slots - 1. grammars: a compiler, or what
    makes one when the first grammar arrives (seconds for a large vocabulary); None refuses grammars.
    """

    def __init__(
        self,
        vocab_size: int,
        max_slots: int,
        *,
        device: torch.device,
        grammars: GrammarCompiler | Callable[[], GrammarCompiler] | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._slots: dict[int, _Slot] = {}
        self._features = np.zeros(max_slots, dtype=np.uint8)
        self._min_tokens = np.zeros(max_slots, dtype=np.int64)
        self._penalties = Penalties(vocab_size, device=device)
        self._bias = LogitBias(vocab_size, device=device)
        self._choice = TokenChoice(vocab_size, max_slots, device=device)

    def admit(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: list[int],
        num_prompt_tokens: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Bind a slot. Tokens beyond the prompt are output so far: positions, counts and grammar resume after them.

        Raises: RequestError for a grammar that does not compile or a token id outside the vocabulary.
        """
        self._check_token_ids(sampling)
        entry = _Slot(sampling)
        if sampling.grammar is not None:
            validate_grammar(sampling.grammar)
            entry.mask = PendingMask(self._compiler(), sampling.grammar, token_ids[num_prompt_tokens:])
        if sampling.logit_bias:
            self._bias.admit(slot, sampling.logit_bias)
        if has_penalties(sampling):
            self._penalties.admit(slot, sampling, token_ids, num_prompt_tokens)
        stop_ids = {token for token in (*eos_token_ids, *sampling.stop_token_ids) if 0 <= token < self._vocab_size}
        entry.banned = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=self._device)
        self._slots[slot] = entry
        self._min_tokens[slot] = sampling.min_tokens
        self._choice.admit(slot, sampling, len(token_ids) - num_prompt_tokens)
        self._features[slot] = _features_of(sampling, has_stop_ids=len(stop_ids) > 0)

    def release(self, slot: int) -> None:
        """Free a slot; a free one is ignored."""
        self._slots.pop(slot, None)
        self._features[slot] = 0
        self._penalties.release(slot)
        self._bias.release(slot)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: list[int]) -> SampledRows:
        """Choose one token per row and advance its slot.

        Args: logits: float32 [R, V], may be modified. slots: the row's slots, [R], each at most once.
        """
        index = np.asarray(slots, dtype=np.int64)
        features = self._features[index]
        present = int(np.bitwise_or.reduce(features, initial=0))
        errors: list[str | None] = [None] * len(slots)
        logprobs: list[TokenLogprobs | None] = [None] * len(slots)
        if present == 0:
            token_ids = _keep_sound(self._choice.choose(logits, index), errors)
        else:
            asking = np.flatnonzero(features & _Feature.LOGPROBS)
            raw = self._raw_logits(logits, asking, adjusts=bool(present & _Feature.ADJUSTS))
            if present & _Feature.ADJUSTS:
                self._adjust(logits, slots, features, errors)
            token_ids = _keep_sound(self._choice.choose(logits, index), errors)
            self._record(token_ids, slots, features, errors)
            self._add_logprobs(logprobs, raw, token_ids, asking, slots, errors)
        self.advance(slots)
        return SampledRows(token_ids, logprobs, errors)

    @torch.inference_mode()
    def sample_device(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """Choose one token per row and advance its slot, without waiting for a CUDA device; `needs_host` is False.

        Args: logits: float [R, V], not modified. slots: the rows' slots, [R], each at most once.
        Returns: int64 [R] on the device, -1 where the logits are not finite.
        """
        token_ids = self._choice.choose(logits, np.asarray(slots, dtype=np.int64))
        self.advance(slots)
        return token_ids

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what draws from logits of a dtype need on a CUDA device, seconds; no slot is touched."""
        for kind in {dtype, torch.float32}:  # `sample` is given float32
            logits = torch.zeros(1, self._vocab_size, dtype=kind, device=self._device)
            self._choice.choose(logits, np.zeros(1, dtype=np.int64))

    def take(self, token_ids: torch.Tensor, logits: torch.Tensor, slots: list[int]) -> SampledRows:
        """Accept the likeliest tokens of greedy rows, found elsewhere, and advance their slots.

        Args: token_ids: int64 [R]. logits: these tokens' own, float32 [R]; one that is not finite is an error.
        """
        errors: list[str | None] = [None] * len(slots)
        token_ids = _keep_sound(torch.where(torch.isfinite(logits), token_ids, -1), errors)
        self.advance(slots)
        return SampledRows(token_ids, [None] * len(slots), errors)

    def needs_host(self, slots: list[int]) -> bool:
        """Whether a row asks for what only `sample` does: it waits for the device."""
        return bool(self._present(slots) & (_Feature.ADJUSTS | _Feature.LOGPROBS))

    def is_greedy(self, slots: list[int]) -> bool:
        """Whether every row wants its likeliest token and nothing else."""
        return self._present(slots) == 0

    def advance(self, slots: list[int]) -> None:
        """Count a token for each of these rows; called for greedy ones whose token was chosen elsewhere."""
        self._choice.positions[slots] += 1

    def _present(self, slots: list[int]) -> int:
        """Features that any of the rows has."""
        return int(np.bitwise_or.reduce(self._features[slots], initial=0))

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            raise Unsupported("structured output is not available: the model has no tokenizer", param="grammar")
        if not isinstance(self._grammars, GrammarCompiler):
            self._grammars = self._grammars()
        return self._grammars

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        for token_id in sampling.logprob_token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"logprob_token_ids names token {token_id}, but the vocabulary has {self._vocab_size}",
                    param="logprob_token_ids",
                )

    def _raw_logits(self, logits: torch.Tensor, rows: NDArray[np.int64], *, adjusts: bool) -> torch.Tensor | None:
        """The model's own logits of rows that ask for logprobs; a copy only if the originals will change."""
        if len(rows) == 0:
            return None
        if len(rows) == len(logits):
            return logits.clone() if adjusts else logits
        return logits[torch.from_numpy(rows).to(logits.device)]

    def _adjust(
        self, logits: torch.Tensor, slots: list[int], features: NDArray[np.uint8], errors: list[str | None]
    ) -> None:
        """Apply bias, penalties, min_tokens and grammar masks in place, in this order."""
        rows = np.flatnonzero(features & _Feature.BIAS).tolist()
        if rows:
            self._bias.apply(logits, rows, [slots[row] for row in rows])
        rows = np.flatnonzero(features & _Feature.PENALTIES).tolist()
        if rows:
            self._penalties.apply(logits, rows, [slots[row] for row in rows])
        for row in np.flatnonzero(features & (_Feature.MIN_TOKENS | _Feature.GRAMMAR)).tolist():
            try:
                self._mask_row(logits[row], slots[row])
            except RequestError as error:
                errors[row] = str(error)

    def _mask_row(self, logits: torch.Tensor, slot: int) -> None:
        entry = self._slots[slot]
        is_early = self._choice.positions[slot] < self._min_tokens[slot]
        if not is_early:
            self._features[slot] &= ~np.uint8(_Feature.MIN_TOKENS)
        if entry.mask is None:
            if is_early and entry.banned is not None:
                logits[entry.banned] = -torch.inf
            return
        bits = np.unpackbits(entry.mask.wait().view(np.uint8), count=self._vocab_size, bitorder="little")
        if is_early and entry.banned is not None:
            without_stops = bits.copy()
            without_stops[entry.banned.cpu().numpy()] = 0
            bits = without_stops if without_stops.any() else bits  # a complete grammar ends the output even so
        logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)

    def _record(
        self, token_ids: torch.Tensor, slots: list[int], features: NDArray[np.uint8], errors: list[str | None]
    ) -> None:
        """Advance the counts and the grammars of the rows that have them."""
        rows = np.flatnonzero(features & _Feature.PENALTIES)
        if len(rows):
            places = torch.from_numpy(rows).to(token_ids.device)
            self._penalties.record([slots[row] for row in rows.tolist()], token_ids[places])
        rows = np.flatnonzero(features & _Feature.GRAMMAR)
        if len(rows):
            host_ids = token_ids.tolist()
            for row in rows.tolist():
                mask = self._slots[slots[row]].mask
                if mask is not None and errors[row] is None:
                    mask.advance(host_ids[row])

    def _add_logprobs(
        self,
        logprobs: list[TokenLogprobs | None],
        raw: torch.Tensor | None,
        token_ids: torch.Tensor,
        rows: NDArray[np.int64],
        slots: list[int],
        errors: list[str | None],
    ) -> None:
        if raw is None:
            return
        samplings = [self._slots[slots[row]].sampling for row in rows.tolist()]
        entries = output_logprobs(raw, token_ids[torch.from_numpy(rows).to(token_ids.device)], samplings)
        for row, entry in zip(rows.tolist(), entries, strict=True):
            logprobs[row] = entry if errors[row] is None else None


def _features_of(sampling: SamplingParams, *, has_stop_ids: bool) -> int:
    features = _Feature(0)
    if not sampling.is_greedy:
        features |= _Feature.RANDOM
    if wants_logprobs(sampling):
        features |= _Feature.LOGPROBS
    if sampling.logit_bias:
        features |= _Feature.BIAS
    if has_penalties(sampling):
        features |= _Feature.PENALTIES
    if sampling.min_tokens > 0 and has_stop_ids:
        features |= _Feature.MIN_TOKENS
    if sampling.grammar is not None:
        features |= _Feature.GRAMMAR
    return int(features)


def _keep_sound(token_ids: torch.Tensor, errors: list[str | None]) -> torch.Tensor:
    """Token ids with 0 for unsound rows, which have -1; their errors are noted unless one is known already."""
    is_sound = token_ids >= 0
    if bool(is_sound.all()):
        return token_ids
    for row, sound in enumerate(is_sound.tolist()):
        if not sound and errors[row] is None:
            errors[row] = UNSOUND
    return torch.where(is_sound, token_ids, 0)
