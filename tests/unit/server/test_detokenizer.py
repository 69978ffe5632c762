"""Detokenizer and stop strings, on tokenizers of each family built here from random text."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from diptych.core.request import SamplingParams
from diptych.server.detokenizer import Detokenizer, OutputText, StopMatcher

CORPUS = ["the quick brown fox", "  jumps over", " the lazy dog", "naive cafe", "hello hello world world"] * 4
SAMPLING = SamplingParams()
FAMILIES = ("byte-level", "sentencepiece", "gemma")


@cache
def make_tokenizer(family: str) -> Tokenizer:
    """A small BPE tokenizer whose decoder is that of GPT-2, Llama 2 or Gemma."""
    if family == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    else:
        words = ["▁the", "▁", "the", "▁a", "hello", "▁hello", "x", "▁▁", "é", "a", "."]
        vocab = {token: index for index, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + words)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        if family == "sentencepiece":
            steps.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def encode(family: str, text: str) -> list[int]:
    """Ids of a text; for the byte-fallback families a greedy longest match, which mixes words and bytes."""
    tokenizer = make_tokenizer(family)
    if family == "byte-level":
        return tokenizer.encode(text, add_special_tokens=False).ids
    vocab = tokenizer.get_vocab()
    ids: list[int] = []
    text = text.replace(" ", "\u2581")
    while text:
        length = next((n for n in range(min(len(text), 6), 0, -1) if text[:n] in vocab), 0)
        ids += [vocab[text[:length]]] if length else [vocab[f"<0x{byte:02X}>"] for byte in text[0].encode()]
        text = text[length or 1 :]
    return ids


LETTERS = st.sampled_from("the a.hello x") | st.characters(exclude_categories=["Cs"])
TEXTS = st.text(LETTERS, max_size=40)
EMOJI = "family \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea e\u0301 \u4f60\u597d\uc548\ub155"


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, data=st.data())
@example(text=EMOJI, data=None)
def test_pieces_join_to_the_whole_text_and_hold_no_half_character(family: str, text: str, data: st.DataObject) -> None:
    tokenizer, ids = make_tokenizer(family), encode(family, text)
    detokenizer = Detokenizer(tokenizer, SAMPLING)
    pieces: list[str] = []
    while ids_left := ids[sum_len(pieces) :]:
        size = 1 if data is None else data.draw(st.integers(1, 5))
        pieces.append((ids_left[:size], detokenizer.add(ids_left[:size], False)))
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for _, piece in pieces)
    last = detokenizer.add([], True)
    assert "".join(piece for _, piece in pieces) + last == tokenizer.decode(ids)


def sum_len(pieces: list[tuple[list[int], str]]) -> int:
    return sum(len(ids) for ids, _ in pieces)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_byte_level_tokens_decode_as_all_at_once(data: st.DataObject, skip: bool) -> None:
    tokenizer = make_tokenizer("byte-level")
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=100))
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    text = "".join(detokenizer.add([token], False) for token in ids) + detokenizer.add([], True)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(["the", " ", "  ", " a", " hello", "x", "<s>", "</s>" * 40]), max_size=60))
def test_spaces_survive_skipped_special_tokens(family: str, words: list[str]) -> None:
    tokenizer = make_tokenizer(family)
    if words and words[0].startswith("<"):
        words = ["the", *words]
    ids: list[int] = []
    for word in words:
        special = word.count("</s>") or word.count("<s>")
        ids += [tokenizer.token_to_id(word[: len(word) // special])] * special if special else encode(family, word)
    detokenizer = Detokenizer(tokenizer, SAMPLING)
    text = "".join(detokenizer.add([token], False) for token in ids) + detokenizer.add([], True)
    assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_invalid_bytes_come_out_before_the_end(family: str) -> None:
    tokenizer = make_tokenizer(family)
    byte = tokenizer.token_to_id("\u00ff" if family == "byte-level" else "<0xFF>")
    detokenizer = Detokenizer(tokenizer, SAMPLING)
    start = detokenizer.add(encode(family, "the"), False)
    pieces = [detokenizer.add([byte], False) for _ in range(200)]
    assert start == "the"
    assert len("".join(pieces)) >= 197
    assert start + "".join(pieces) + detokenizer.add([], True) == "the" + "\ufffd" * 200


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unfinished_character_is_flushed_once(family: str) -> None:
    tokenizer = make_tokenizer(family)
    detokenizer = Detokenizer(tokenizer, SAMPLING)
    ids = encode(family, "x\U0001f600")[:-1]
    assert detokenizer.add(ids, False) == "x"
    assert set(detokenizer.add([], True)) == {"\ufffd"}
    assert detokenizer.add([], True) == ""


def test_an_invalid_byte_after_a_returned_character_keeps_that_character() -> None:
    tokenizer = make_tokenizer("gemma")
    ids = [*encode("gemma", "\uc548"), tokenizer.token_to_id("<0xFF>"), *encode("gemma", "the")]
    detokenizer = Detokenizer(tokenizer, SAMPLING)
    assert "".join(detokenizer.add([token], False) for token in ids) == "\uc548\ufffdthe"


def test_a_prompt_keeps_the_leading_space_of_its_continuation() -> None:
    tokenizer = make_tokenizer("sentencepiece")
    prompt, output = encode("sentencepiece", "the"), encode("sentencepiece", " hello")
    alone = Detokenizer(tokenizer, SAMPLING)
    continued = Detokenizer(tokenizer, SAMPLING, prompt_token_ids=prompt)
    assert (alone.add(output, True), continued.add(output, True)) == ("hello", " hello")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", range(8))
def test_a_prompt_of_byte_tokens_is_no_trap(family: str, cut: int) -> None:
    prompt = [*encode(family, "x"), *encode(family, "\U0001f600" * 9)]
    detokenizer = Detokenizer(make_tokenizer(family), SAMPLING, prompt_token_ids=prompt[4 * cut :])
    assert detokenizer.add(encode(family, "\uc548the"), True) == "\uc548the"


def test_special_tokens_show_only_if_asked_for() -> None:
    tokenizer = make_tokenizer("byte-level")
    ids = [*encode("byte-level", "the"), tokenizer.token_to_id("</s>")]
    assert Detokenizer(tokenizer, SAMPLING).add(ids, True) == "the"
    assert Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)).add(ids, True) == "the</s>"


class CountingDecoder:
    """Counts the tokens that the detokenizer has decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["the ", "\U0001f600", " ", "\ufffd", "</s>"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(family: str, text: str) -> None:
    decoder = CountingDecoder(make_tokenizer(family))
    ids = [decoder.tokenizer.token_to_id(text)] * 2000 if text == "</s>" else encode(family, text * 2000)
    detokenizer = Detokenizer(decoder, SAMPLING)
    for token_id in ids:
        detokenizer.add([token_id], False)
    assert decoder.num_decoded / len(ids) <= 50


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_costs_microseconds(family: str) -> None:
    outputs = [OutputText(make_tokenizer(family), SamplingParams(stop=("never", "ever so"))) for _ in range(32)]
    ids = encode(family, "the quick brown fox hello hello. " * 4)
    best = float("inf")
    for token_id in ids:
        start = time.perf_counter()
        for output in outputs:
            output.add([token_id], False)
        best = min(best, (time.perf_counter() - start) / len(outputs))
    assert best < 100e-6  # a few microseconds on an idle machine


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The rule said plainly: the earliest end, then the longest."""
    ends = [(end, -len(stop), stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    return (min(ends)[0], min(ends)[2]) if ends else None


SMALL = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(text=SMALL, stops=STOPS, include=st.booleans(), data=st.data())
def test_stop_strings_end_the_text_however_it_is_cut(
    text: str, stops: tuple[str, ...], include: bool, data: st.DataObject
) -> None:
    matcher = StopMatcher(SamplingParams(stop=stops, include_stop_text=include))
    shown, position, found = "", 0, first_stop(text, stops)
    while position < len(text):
        size = data.draw(st.integers(1, 4))
        shown += matcher.add(text[position : position + size], 1)
        position = min(position + size, len(text))
        if matcher.matched is None and not include:
            held = position - len(shown)
            assert text[:position].startswith(shown)
            assert held == 0 or any(stop.startswith(text[position - held : position]) for stop in stops)
    shown += matcher.flush()
    end, stop = found if found else (len(text), "")
    assert matcher.matched == (stop or None)
    assert shown == (text[:end] if include else text[: end - len(stop)])
    assert matcher.num_returned == len(shown)


def test_of_stops_that_end_together_the_longest_wins() -> None:
    matcher = StopMatcher(SamplingParams(stop=("\nUser:", "\n\nUser:")))
    assert matcher.add("Fine.\n\nUser: and", 1) == "Fine."
    assert matcher.matched == "\n\nUser:"


def test_a_stop_string_before_min_tokens_is_text() -> None:
    matcher = StopMatcher(SamplingParams(stop=("END",), min_tokens=3))
    assert matcher.add("aEND", 1) + matcher.add("bEN", 2) + matcher.add("Dc", 3) == "aENDb"
    assert matcher.matched == "END"


def test_a_very_long_stop_string_is_linear() -> None:
    matcher = StopMatcher(SamplingParams(stop=("a" * 50_000 + "b",)))
    start = time.perf_counter()
    assert len(matcher.add("a" * 100_000, 1)) == 50_000
    assert time.perf_counter() - start < 5


def test_output_counts_tokens_up_to_the_one_that_completed_the_stop() -> None:
    ids = encode("byte-level", "hello world. the quick brown")
    tokens = [make_tokenizer("byte-level").decode([token]) for token in ids]
    output = OutputText(make_tokenizer("byte-level"), SamplingParams(stop=("ld. t",)))
    piece = output.add(ids, True)
    needed = next(n for n in range(len(ids)) if "ld. t" in "".join(tokens[:n]))
    assert (piece.text, piece.matched_stop) == ("hello wor", "ld. t")
    assert piece.num_tokens == output.num_tokens == needed
    assert output.add(ids, True).text == ""


def test_output_without_a_match_returns_what_it_held_back() -> None:
    output = OutputText(make_tokenizer("byte-level"), SamplingParams(stop=("brown fox",)))
    ids = encode("byte-level", "the brown")
    first = output.add(ids, False)
    last = output.add([], True)
    assert (first.text, last.text) == ("the ", "brown")
    assert (first.num_tokens, last.num_tokens, output.num_tokens) == (len(ids), 0, len(ids))
