"""Token ids to text, a piece at a time, and the stop strings that end it.

Owns one request's text: which characters are complete, which could still become a stop string, and how many tokens the
text took. Must not know of HTTP, chats or engines; runs on the server's event loop, so the cost of a token is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.core.request import SamplingParams

REPLACEMENT = "\ufffd"
MAX_OPEN_CHARACTERS = 3
"""An unfinished character has at most three of its four bytes, and some decoders show each as a U+FFFD."""
MAX_WINDOW = 32
USUAL_WINDOW = 8
CONTEXT_LENGTHS = (4, 8, 16, 32)


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Text of one request, token by token; never half a character.

    The pieces joined are the text of all tokens decoded at once, but for one case: a run of byte tokens with an invalid
    byte in it. Decoders garble the whole run; here the characters returned before that byte stay. Only a window of the
    last tokens is decoded again: it starts at a character border and begins with text that was returned before, so that
    decoders which strip a leading space see no beginning where there is none.

    Args: prompt_token_ids: the prompt, if the output continues its text (completions): a leading space of the
    first word is then kept. Empty: the output is a text of its own (chats).
    """

    def __init__(self, decoder: Decoder, sampling: SamplingParams, *, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._skip_special_tokens = sampling.skip_special_tokens
        self._window = self._prompt_context(prompt_token_ids)
        self._returned = self._decode(self._window)  # text of the window that needs no returning any more
        self._border = len(self._window)  # tokens of the window up to the last character border

    def add(self, token_ids: list[int], finished: bool) -> str:
        """New text after these tokens; `finished` also returns what is left of an unfinished character."""
        pieces = [self._add_token(token_id) for token_id in token_ids]
        if finished and self._border < len(self._window):
            pieces.append(self._flush())
        return "".join(pieces)

    def _add_token(self, token_id: int) -> str:
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        complete = _without_open_character(text)
        is_open = len(complete) < len(text)
        if not complete.startswith(self._returned):
            # Decoders with byte tokens garble a whole run of bytes while its last character is unfinished.
            return "" if is_open and len(window) - self._border <= MAX_OPEN_CHARACTERS else self._restart()
        piece = complete[len(self._returned) :]
        self._returned = complete
        if not is_open:
            self._close_character(is_silent=not piece)
        elif len(window) > MAX_WINDOW:
            self._shift(len(window) - USUAL_WINDOW)
        return piece

    def _close_character(self, is_silent: bool) -> None:
        """The window ends at a character border: shorten it if it is long enough to stand without its beginning."""
        window = self._window
        if is_silent and (self._returned or len(window) > MAX_WINDOW):
            window.pop()  # a skipped special token must not become the only context of the next one
        elif len(window) > MAX_WINDOW:
            self._shift(len(window) - USUAL_WINDOW)
        elif len(window) > USUAL_WINDOW:
            self._shift(self._border)
        self._border = len(self._window)

    def _shift(self, start: int) -> None:
        """Drop the window's first `start` tokens, if the others have text of their own to serve as context."""
        tail = self._window[start:]
        text = self._decode(tail)
        if text or len(self._window) > MAX_WINDOW:
            self._window = tail
            self._returned = _without_open_character(text)
            self._border = max(self._border - start, 0)

    def _restart(self) -> str:
        """Go on with the tokens after the last border alone: an invalid byte has garbled text already returned."""
        self._window = self._window[self._border :]
        self._border = len(self._window)
        self._returned = _without_open_character(self._decode(self._window))
        return self._returned

    def _flush(self) -> str:
        text = self._decode(self._window)
        if not text.startswith(self._returned):
            text = self._returned + self._decode(self._window[self._border :])
        piece = text[len(self._returned) :]
        self._returned = text
        self._border = len(self._window)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, self._skip_special_tokens) if token_ids else ""

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The shortest end of the prompt that is whole characters; empty if there is none."""
        for length in CONTEXT_LENGTHS:
            context = list(prompt_token_ids[-length:])
            text = self._decode(context)
            if text and REPLACEMENT not in text:
                return context
            if length >= len(prompt_token_ids):
                break
        return []


def _without_open_character(text: str) -> str:
    """`text` without the U+FFFD at its end that further bytes may still turn into a character."""
    if not text.endswith(REPLACEMENT):
        return text
    end = len(text)
    while end > 0 and len(text) - end < MAX_OPEN_CHARACTERS and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, and holds back only what could still become one.

    The stop string that is complete first wins; of those that the same character completes, the longest. So the outcome
    does not depend on how the text was cut into pieces. A stop string completed before output token
    number `min_tokens` is ordinary text. With `include_stop_text` nothing needs holding back.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._stops = sampling.stop
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._matched_lengths = [0] * len(self._stops)
        self._include_stop_text = sampling.include_stop_text
        self._min_tokens = sampling.min_tokens
        self._held = ""
        self.num_returned = 0
        """Characters returned so far; after a match this is where the output ends in the generated text."""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str, num_tokens: int) -> str:
        """Text that may be shown now. `num_tokens`: output tokens so far, with the one that brought `text`."""
        if self.matched is not None:
            return ""
        if not any(self._matched_lengths) and self._first_characters.isdisjoint(text):
            return self._return(text)
        for position, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None and num_tokens >= self._min_tokens:
                return self._end(text[: position + 1], stop)
        text = self._held + text
        held_len = 0 if self._include_stop_text else max(self._matched_lengths)
        self._held = text[len(text) - held_len :]
        return self._return(text[: len(text) - held_len])

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return self._return(held)

    def _return(self, text: str) -> str:
        self.num_returned += len(text)
        return text

    def _end(self, text: str, stop: str) -> str:
        self.matched = stop
        text = self._held + text
        self._held = ""
        return self._return(text if self._include_stop_text else text[: len(text) - len(stop)])

    def _advance(self, character: str) -> str | None:
        """Take one character; the longest stop string that it completes (Knuth, Morris and Pratt's automaton)."""
        longest: str | None = None
        for index, stop in enumerate(self._stops):
            borders = self._borders[index]
            length = self._matched_lengths[index]
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                if longest is None or len(stop) > len(longest):
                    longest = stop
                length = borders[length - 1]
            self._matched_lengths[index] = length
        return longest


def _border_lengths(pattern: str) -> list[int]:
    """For each beginning of `pattern`: the length of its longest proper beginning that is also its end."""
    lengths = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = lengths[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        lengths[index] = length
    return lengths


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text of one request. num_tokens: how many of the tokens just added the text needed (all, unless it stopped).

    matched_stop: the stop string that ended the text, if one did: the rest of the tokens is to be ignored.
    """

    text: str
    num_tokens: int
    matched_stop: str | None


class OutputText:
    """Detokenizer and stop strings of one request: token ids in, text for the client out.

    A stop token that ended the request is no text: leave it out of `token_ids`, or special tokens that are not skipped
    would show it. Args: as Detokenizer.
    """

    def __init__(self, decoder: Decoder, sampling: SamplingParams, *, prompt_token_ids: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(decoder, sampling, prompt_token_ids=prompt_token_ids)
        self._matcher = StopMatcher(sampling)
        self.num_tokens = 0
        """Output tokens so far, up to the one that completed a stop string: what usage counts."""

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    def add(self, token_ids: list[int], finished: bool) -> TextPiece:
        """Text that may be shown after these tokens; nothing more after a stop string."""
        pieces: list[str] = []
        num_used = 0
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            num_used += 1
            text = self._detokenizer.add([token_id], False)
            pieces.append(self._matcher.add(text, self.num_tokens + num_used))
        self.num_tokens += num_used
        if finished:
            pieces.append(self._matcher.add(self._detokenizer.add([], True), self.num_tokens))
            pieces.append(self._matcher.flush())
        return TextPiece("".join(pieces), num_used, self._matcher.matched)
