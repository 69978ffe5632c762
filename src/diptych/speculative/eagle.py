"""Drafts from an EAGLE head: one decoder layer that predicts the target's next hidden state from its last ones.

At position p the head sees the target's hidden state there (after the last norm) beside the embedding of token p + 1,
which is known by then; what it predicts is the hidden state at p + 1, which the target's own head turns into token
p + 2. From there on it continues with its own predictions. Li et al. 2024, https://arxiv.org/abs/2401.15077.

Owns the head and each slot's last prediction. Its keys and values lie in the target's pages, as further layers.
Worker's thread. T = tokens of the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import nn

from diptych.attention.backend import AttentionBackend, ForwardInputs
from diptych.core.batch import SequenceStep
from diptych.layers.embedding import Embedding
from diptych.layers.linear import Linear
from diptych.layers.norm import RMSNorm
from diptych.layers.rotary import RotaryEmbedding
from diptych.layers.weights import WeightSource
from diptych.models.config import TransformerConfig
from diptych.models.rope import rope_frequencies
from diptych.models.transformer import Loadable, SelfAttention, Transformer, gated_mlp
from diptych.speculative.draft_model import BuildInputs
from diptych.speculative.drafter import DraftRow, Texts


class EagleHead(nn.Module):
    """The layer, with the names of a checkpoint. It normalises its input to the MLP, but not that to attention."""

    def __init__(
        self, config: TransformerConfig, *, has_bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype=dtype, device=device)
        self.fc = Linear(2 * hidden, hidden, bias=has_bias, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, 0, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = gated_mlp(config, dtype=dtype, device=device)
        frequencies, magnitude = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.rotary = RotaryEmbedding(frequencies, magnitude, dtype=dtype, device=device)

    def forward(self, inputs: ForwardInputs, hidden: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Predicted hidden states [T, hidden]; `inputs.token_ids` are the tokens after those of `hidden`."""
        x = self.fc(torch.cat([self.embed_tokens(inputs.token_ids), hidden], dim=1))
        attended = self.self_attn(x, self.rotary(inputs.positions), inputs.attention, attention)
        return x.add_(self.mlp(self.post_attention_layernorm.after_adding(x, attended)))

    def load(self, source: WeightSource) -> None:
        """Read all weights. Raises ConfigError for one that is missing or has another shape."""
        for name, child in self.named_children():
            if name != "rotary":
                cast(Loadable, child).load(source, _PREFIXES.get(name, f"model.layers.0.{name}"))


_PREFIXES = {"embed_tokens": "model.embed_tokens", "fc": "fc"}


class EagleDrafter:
    """A `Drafter` with an EAGLE head beside its target.

    Args: attention: over the head's layer of the pool.
    """

    needs_hidden = True

    def __init__(
        self,
        head: EagleHead,
        target: Transformer,
        attention: AttentionBackend,
        texts: Texts,
        build_inputs: BuildInputs,
    ) -> None:
        self._head = head
        self._target = target
        self._attention = attention
        self._texts = texts
        self._build_inputs = build_inputs
        num_slots, weight = len(texts.num_tokens), head.fc.weight
        self._predicted = torch.zeros(num_slots, head.fc.out_features, dtype=weight.dtype, device=weight.device)
        self._first_guess = np.zeros(num_slots, dtype=np.int64)
        self._guess_place = np.full(num_slots, -1, dtype=np.int64)  # the token that the first guess is of

    def admit(self, slot: int, num_cached_tokens: int) -> None:
        self._guess_place[slot] = -1

    def follow(self, steps: list[SequenceStep], hidden: torch.Tensor | None) -> None:
        assert hidden is not None, "the runner passes hidden states to a drafter that needs them"
        texts = self._texts.token_ids
        shifted = [texts[step.slot, step.start + 1 : step.start + step.num_tokens + 1] for step in steps]
        token_ids = torch.from_numpy(np.concatenate(shifted).astype(np.int64)).to(hidden.device)
        guesses = self._continue(steps, token_ids, hidden)
        for step, guess in zip(steps, guesses, strict=True):
            self._first_guess[step.slot] = guess
            self._guess_place[step.slot] = step.start + step.num_tokens + 1

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """None for a text whose last token the head has not followed: its KV came from a peer or the prefix cache."""
        known = self._texts.num_tokens
        drafts: dict[int, list[int]] = {
            row.slot: [int(self._first_guess[row.slot])] if self._guess_place[row.slot] == known[row.slot] else []
            for row in rows
        }
        for place in range(1, max(row.most for row in rows)):
            going = [row.slot for row in rows if place < row.most and drafts[row.slot]]
            if not going:
                break
            steps = [SequenceStep(slot, int(known[slot]) + place - 2, 1, [], True) for slot in going]
            last = torch.tensor([drafts[slot][-1] for slot in going], device=self._predicted.device)
            for slot, guess in zip(going, self._continue(steps, last, self._predicted[going]), strict=True):
                drafts[slot].append(guess)
        return [drafts[row.slot] for row in rows]

    def _continue(self, steps: list[SequenceStep], token_ids: torch.Tensor, hidden: torch.Tensor) -> list[int]:
        """Run the head over some rows, keep each one's last prediction; returns the token that follows from it."""
        inputs = self._build_inputs([SequenceStep(step.slot, step.start, step.num_tokens, [], True) for step in steps])
        predicted = self._head(replace(inputs, token_ids=token_ids), hidden, self._attention)[inputs.logit_rows]
        self._predicted[[step.slot for step in steps]] = predicted
        likeliest = self._target.likeliest(predicted)
        found = self._target.logits(predicted).argmax(dim=1) if likeliest is None else likeliest[0]
        guesses: list[int] = found.tolist()
        return guesses
