"""Bytes of single tokens, in both spellings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.config import EngineConfig, ModelConfig
from diptych.server.state import load_text_tools
from diptych.server.token_texts import TokenTexts


class Pieces:
    """A SentencePiece-like vocabulary."""

    tokens = ("<s>", "\u2581the", "<0x0A>", "<0xE2>", "\u2581", "caf\u00e9", "<extra>")
    vocab_size = len(tokens) + 1
    special_ids = frozenset({0, 6})

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokens[token_id] if token_id < len(self.tokens) else None

    def token_to_id(self, token: str) -> int | None:
        return self.tokens.index(token) if token in self.tokens else None


def test_sentencepiece_spelling():
    texts = TokenTexts(Pieces())
    assert [texts.bytes_of(token_id) for token_id in range(8)] == [
        b"<s>", b" the", b"\n", b"\xe2", b" ", "caf\u00e9".encode(), b"<extra>", b"",
    ]  # fmt: skip
    assert texts.text_of(3) == "\ufffd" and texts.text_of(1) == " the"
    assert texts.max_token_chars == len("<extra>")


def test_byte_level_tokens_spell_any_text(tokenizer_folder):
    tools = load_text_tools(EngineConfig(model=ModelConfig(model_path=str(tokenizer_folder))))

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def spells(text: str) -> None:
        token_ids = tools.tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tools.token_texts.bytes_of, token_ids)) == text.encode()

    spells()
    assert tools.token_texts.bytes_of(256) == b"</s>"
