"""A tokenizer of single bytes, small enough to reason about, and a compiler over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diptych.sampling.grammar import GrammarCompiler

NUM_PADDING = 27  # columns of the logits that no token stands for


@dataclass(frozen=True)
class ByteTokenizer:
    """json: the tokenizer; vocab_size: with padding columns; eos: its end token."""

    json: str
    num_tokens: int
    eos: int = 0

    @property
    def vocab_size(self) -> int:
        return self.num_tokens + NUM_PADDING

    def encode(self, text: str) -> list[int]:
        ids: list[int] = Tokenizer.from_str(self.json).encode(text).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        text: str = Tokenizer.from_str(self.json).decode(token_ids)
        return text


@pytest.fixture(scope="session")
def tokenizer() -> ByteTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<eos>", "<pad>", *alphabet, "tr", "ue", "true", '":', 'a"']
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ("a", '"')]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    built = Tokenizer(model)
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<eos>", "<pad>"])
    return ByteTokenizer(built.to_str(), built.get_vocab_size())


@pytest.fixture(scope="session")
def compiler(tokenizer: ByteTokenizer) -> Iterator[GrammarCompiler]:
    built = GrammarCompiler(tokenizer.json, tokenizer.vocab_size, (tokenizer.eos,))
    yield built
    built.close()
