"""A `tokenizers.Tokenizer` from what a GGUF file says about its vocabulary.

Two kinds are supported: SentencePiece BPE ("llama": scores, byte fallback) and byte-level BPE ("gpt2": merges, and a
pre-tokenizer by name). Owns what GGUF leaves out: the merges of SentencePiece, the splitting patterns. Never imports
torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PATTERNS = {
    "default": GPT2_PATTERN,
    "gpt-2": GPT2_PATTERN,
    "llama-bpe": LLAMA3_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "llama-v3": LLAMA3_PATTERN,
    "smaug-bpe": LLAMA3_PATTERN,
    "tekken": TEKKEN_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "deepseek-r1-qwen": QWEN2_PATTERN,
}
"""How text is cut before merging, by `tokenizer.ggml.pre`: each is the pattern that its vocabulary was trained with."""

WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
"""Vocabularies in which a word that is a token is never taken apart, whatever the merges say."""

COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Vocabularies whose text is brought to Unicode form NFC first."""


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The file's tokenizer, adding no BOS or EOS. Raises ConfigError for an unsupported kind or pre-tokenizer."""
    kind = file.text("tokenizer.ggml.model")
    if kind is None:
        raise ConfigError(f"{file.path} holds no tokenizer; name one with --tokenizer-path.")
    tokens = file.texts("tokenizer.ggml.tokens")
    if kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    elif kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    else:
        raise ConfigError(
            f"{file.path} has a tokenizer of kind {kind!r}; kinds llama and gpt2 are supported. "
            "Name the model's tokenizer.json with --tokenizer-path."
        )
    _add_special_tokens(tokenizer, file, tokens)
    return tokenizer


def sentencepiece_merges(tokens: list[str], vocabulary: set[str]) -> list[tuple[str, str]]:
    """Every pair of tokens whose concatenation is one of `tokens`, in the order of `tokens`, longest left part first.

    SentencePiece merges whichever pair gives the best-ranked token; spelt out as a list this is that rule.
    """
    return [
        (left, right)
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in vocabulary and (right := token[cut:]) in vocabulary
    ]


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Gemma's differs from Llama's: no space in front, and the order of merges is the vocabulary's, not the scores'."""
    gemma = (file.text("general.architecture") or "").startswith("gemma")
    if gemma:
        tokens = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
    ranked = tokens if gemma else _by_score(file, tokens)
    unknown = file.integer("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        _bpe(
            file,
            tokens,
            merges=sentencepiece_merges(ranked, set(tokens)),
            unk_token=None if unknown is None or unknown >= len(tokens) else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.flag("tokenizer.ggml.add_space_prefix")
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    else:
        scheme = "first" if prefix is None or prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not gemma and prefix is not False:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bpe(file: GGUFFile, tokens: list[str], **options: Any) -> models.BPE:
    """The library's BPE over the file's tokens. Raises ConfigError if tokens occur twice or merges name others."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError(f"{file.path}: {len(tokens) - len(vocabulary)} tokens occur twice; convert the model again.")
    try:
        return models.BPE(vocab=vocabulary, **options)
    except Exception as error:  # the library raises plain Exception for whatever is wrong
        raise ConfigError(f"{file.path}: its merges do not fit its tokens ({error}); convert it again.") from error


def _by_score(file: GGUFFile, tokens: list[str]) -> list[str]:
    """Tokens from the best score to the worst; equal scores in the vocabulary's order."""
    scores = file.numbers("tokenizer.ggml.scores").astype(np.float64)
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path}: {len(scores)} scores for {len(tokens)} tokens; convert the model again.")
    return [tokens[index] for index in np.argsort(-scores, kind="stable").tolist()]


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    name = file.text("tokenizer.ggml.pre") or "default"
    if name not in PATTERNS:
        raise ConfigError(
            f"{file.path} cuts text by the rule {name!r}, which is not supported; supported are: "
            f"{', '.join(PATTERNS)}. Name the model's tokenizer.json with --tokenizer-path."
        )
    pairs = [text.partition(" ") for text in file.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        _bpe(
            file,
            tokens,
            merges=[(left, right) for left, _, right in pairs],
            ignore_merges=name in WHOLE_WORDS_FIRST,
        )
    )
    if name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Control tokens are special; tokens that the model's makers defined are matched whole but are plain text."""
    if not file.is_array("tokenizer.ggml.token_type"):
        return
    kinds = file.numbers("tokenizer.ggml.token_type")
    special = [tokens[index] for index in np.flatnonzero((kinds == TokenType.CONTROL) | (kinds == TokenType.UNKNOWN))]
    defined = [tokens[index] for index in np.flatnonzero(kinds == TokenType.USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    known = [token for token in defined if tokenizer.token_to_id(token) is not None]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in known])
