"""Reasoning parsers: what is thought, what is said, and that pieces give what the whole gives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.server.reasoning import PARSERS, ReasoningPiece, make_reasoning_parser

PROMPTS = ["", "<|assistant|>\n", "<|assistant|><think>\n", "<|assistant|><think>\n\n</think>\n\n"]

CASES = [
    ("think", "", "<think>\nHm. Well.\n</think>\n\nYes.\n", "Hm. Well.", "Yes.\n"),
    ("qwen3", "", " \n<think>a</think>b</think>", "a", "b</think>"),
    ("qwen3", "", "  Yes <think>no</think>", "", "  Yes <think>no</think>"),
    ("qwen3", "", "<think>cut off ", "cut off", ""),
    ("qwen3", "", "<thin", "", "<thin"),
    ("qwen3", "", "  ", "", "  "),
    ("qwen3", "", "<think></think>", "", ""),
    ("qwen3", "<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "<think> is a tag.", "", "<think> is a tag."),
    ("deepseek_r1", "", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", "", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", "", "\nHm </thin", "Hm </thin", ""),
    ("deepseek_r1", "</think>", "Yes.", "", "Yes."),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_splits_reasoning_from_content(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    parser = make_reasoning_parser(name, prompt)
    assert parser is not None
    assert parser.parse(text) == (reasoning, content)


SOUP = st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "Hm.", "\u00e9"]), max_size=12)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=300, deadline=None)
@given(text=SOUP.map("".join), prompt=st.sampled_from(PROMPTS), data=st.data())
def test_any_split_gives_what_the_whole_text_gives(name: str, text: str, prompt: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    whole = PARSERS[name](prompt).parse(text)
    for pieces in ([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])], list(text)):
        parser = PARSERS[name](prompt)
        found = [*(parser.stream(piece) for piece in pieces), parser.finish()]
        assert ("".join(piece.reasoning for piece in found), "".join(piece.content for piece in found)) == whole
    removed = text.replace("<think>", "", 1) if text.lstrip().startswith("<think>") else text
    words = "".join(whole.reasoning.split() + whole.content.split())
    assert words in {"".join(version.split()) for version in (text, removed, removed.replace("</think>", "", 1))}


def test_reasoning_streams_at_once() -> None:
    parser = PARSERS["deepseek_r1"]()
    assert parser.stream("I think") == ReasoningPiece("I think", "")
    assert parser.stream(" so </th") == ReasoningPiece(" so", "")
    assert parser.stream("ink> Yes") == ReasoningPiece("", "Yes")


def test_none_is_no_parser() -> None:
    assert make_reasoning_parser("none") is None
