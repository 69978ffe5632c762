"""Prompt lookup against a loop over all places."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.speculative.drafter import DraftRow, Texts
from diptych.speculative.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter, continuation


def slow_continuation(text: list[int], most: int) -> list[int]:
    best, start = 0, 0
    for end in range(1, len(text)):  # the match is text[:end], as far back as it goes
        length = 0
        while length < min(end, MAX_MATCH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= max(best, MIN_MATCH):
            best, start = length, end
    longer = list(text)
    for place in range(most if best else 0):
        longer.append(longer[start + place])
    return longer[len(text) :]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 12))
def test_the_latest_of_the_longest_matches(text, most) -> None:
    assert continuation(np.array(text, dtype=np.int32), most) == slow_continuation(text, most)


def test_a_loop_goes_round() -> None:
    assert continuation(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2], dtype=np.int32), 7) == [3, 1, 2, 3, 1, 2, 3]


def test_only_known_tokens_count() -> None:
    token_ids = np.array([[1, 2, 5, 1, 2, 0, 0], [1, 2, 3, 4, 5, 6, 7]], dtype=np.int32)
    drafter = NgramDrafter(Texts(token_ids, np.array([5, 7])))
    assert drafter.propose([DraftRow(1, 3), DraftRow(0, 2)]) == [[], [5, 1]]
