"""What each single token of a vocabulary spells, for logprobs and for bounds.

A tokenizer decodes sequences: of a token alone it drops the leading space, and it cannot show a part of a character.
Here a token is its bytes. Knows the two spellings in use: GPT-2's byte-level alphabet, and SentencePiece's, with
`<0x0A>` for a byte.
"""

from __future__ import annotations

import re
from typing import Protocol

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_LEVEL_SPACE = "\u0120"


class Vocabulary(Protocol):
    """The part of a tokenizer that is needed here."""

    vocab_size: int
    special_ids: frozenset[int]

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself if printable, else the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class TokenTexts:
    """Bytes and text of single tokens; remembers what was asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._is_byte_level = (
            vocabulary.token_to_id(_BYTE_LEVEL_SPACE) is not None
            and vocabulary.token_to_id(_SENTENCEPIECE_SPACE) is None
        )
        self._bytes: dict[int, bytes] = {}
        spellings = (vocabulary.id_to_token(token_id) for token_id in range(vocabulary.vocab_size))
        self.max_token_chars = max((len(spelling or "") for spelling in spellings), default=1) or 1
        """No token spells more characters than this."""

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token stands for, maybe only a part of a character; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """The bytes as text, with U+FFFD for what is no whole character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        spelling = self._vocabulary.id_to_token(token_id) or ""
        if token_id in self._vocabulary.special_ids:
            return spelling.encode()
        if self._is_byte_level:
            if all(character in _ALPHABET for character in spelling):
                return bytes(_ALPHABET[character] for character in spelling)
            return spelling.encode()  # an added token, spelled as it is
        match = _BYTE.fullmatch(spelling)
        if match is not None:
            return bytes([int(match[1], 16)])
        return spelling.replace(_SENTENCEPIECE_SPACE, " ").encode()
