from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import pytest

from diptych.core.request import Grammar, GrammarKind
from diptych.errors import RequestError, Unsupported
from diptych.sampling.grammar import GrammarCompiler, GrammarMatcher, PendingMask

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["a", "kind", "n", "tags"],
    "additionalProperties": False,
}


def allowed(mask: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def next_tokens(matcher: GrammarMatcher, compiler: GrammarCompiler) -> list[int]:
    mask = np.full(-(-compiler.vocab_size // 32), -1, dtype=np.int32)
    matcher.fill(mask)
    return allowed(mask)


def write(compiler: GrammarCompiler, grammar: Grammar, eos: int, seed: int) -> list[int]:
    """A random walk through the grammar until EOS."""
    rng = np.random.default_rng(seed)
    matcher = compiler.compile(grammar)
    output: list[int] = []
    for _ in range(2000):
        token = int(rng.choice(next_tokens(matcher, compiler)))
        if token == eos:
            return output
        matcher.accept(token)
        output.append(token)
    raise AssertionError("the grammar does not end")


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_obey_their_grammars(compiler: GrammarCompiler, tokenizer: Any, seed: int) -> None:
    text = tokenizer.decode(write(compiler, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), tokenizer.eos, seed))
    value = json.loads(text)
    assert set(value) == set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert value["kind"] in ("cat", "dog") and 0 <= value["n"] <= 99 and isinstance(value["a"], bool)
    text = tokenizer.decode(write(compiler, Grammar(GrammarKind.REGEX, r"[a-c]{2,5}-\d\d?"), tokenizer.eos, seed))
    assert re.fullmatch(r"[a-c]{2,5}-\d\d?", text)
    text = tokenizer.decode(
        write(compiler, Grammar(GrammarKind.CHOICE, '["yes", "no\\n", "\\u00e9"]'), tokenizer.eos, seed)
    )
    assert text in ("yes", "no\n", "\u00e9")
    ebnf = 'root ::= term ("+" term){1,3}\nterm ::= [0-9] | "(" [0-9] "*" [0-9] ")"'
    text = tokenizer.decode(write(compiler, Grammar(GrammarKind.EBNF, ebnf), tokenizer.eos, seed))
    assert re.fullmatch(r"(\d|\(\d\*\d\))(\+(\d|\(\d\*\d\))){1,3}", text)


def test_a_complete_grammar_allows_nothing_but_eos(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.CHOICE, '["ab"]'))
    for token in tokenizer.encode("ab"):
        assert not matcher.is_complete
        matcher.accept(token)
    assert matcher.is_complete
    assert next_tokens(matcher, compiler) == [tokenizer.eos]
    matcher.accept(tokenizer.eos)
    matcher.accept(17)  # ignored
    assert next_tokens(matcher, compiler) == [tokenizer.eos]


def test_padding_and_special_tokens_are_never_allowed(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, r"(?s:.*)"))
    tokens = next_tokens(matcher, compiler)
    assert max(tokens) < tokenizer.num_tokens < compiler.vocab_size
    assert 1 not in tokens
    assert {tokenizer.eos, *tokenizer.encode("tr")} <= set(tokens)


def test_a_model_with_fewer_rows_than_the_tokenizer_has_tokens_is_served(tokenizer: Any) -> None:
    compiler = GrammarCompiler(tokenizer.json, 100, (tokenizer.eos,))
    tokens = next_tokens(compiler.compile(Grammar(GrammarKind.REGEX, "[A-Z]+")), compiler)
    assert tokens == sorted(tokenizer.encode("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    compiler.close()


def test_a_token_that_does_not_fit_is_an_error_that_stays(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "a+b"))
    with pytest.raises(RequestError, match="doesn't satisfy"):
        matcher.accept(tokenizer.encode("z")[0])
    with pytest.raises(RequestError):
        next_tokens(matcher, compiler)
    assert not matcher.is_complete


@pytest.mark.parametrize("text", ['{"$ref": "#"}', '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'])
def test_a_grammar_that_nothing_satisfies_is_an_error(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(RequestError, match="json_schema"):
        next_tokens(compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, text)), compiler)


def test_grammars_are_compiled_once_and_the_oldest_are_forgotten(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer.json, tokenizer.vocab_size, (tokenizer.eos,))
    compiled: list[Grammar] = []
    original = GrammarCompiler._compile

    def counting(self: GrammarCompiler, grammar: Grammar, tokenizer: Any) -> Any:
        compiled.append(grammar)
        return original(self, grammar, tokenizer)

    monkeypatch.setattr(GrammarCompiler, "_compile", counting)
    monkeypatch.setattr("diptych.sampling.grammar._CACHE_LEN", 2)
    one, two, three = (Grammar(GrammarKind.REGEX, text) for text in ("a", "b", "c"))
    for grammar in (one, one, two, one, three, one, two):
        compiler.compile(grammar)
    assert compiled == [one, two, three, two]
    compiler.close()


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = Grammar(GrammarKind.CHOICE, '["ax", "by"]')
    one, other = compiler.compile(grammar), compiler.compile(grammar)
    one.accept(tokenizer.encode("a")[0])
    assert next_tokens(one, compiler) == tokenizer.encode("x")
    assert sorted(next_tokens(other, compiler)) == sorted(tokenizer.encode("a") + tokenizer.encode("b"))


def test_a_pending_mask_replays_output_and_is_computed_off_the_callers_thread(
    compiler: GrammarCompiler, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    original = GrammarMatcher.fill

    def recording(self: GrammarMatcher, mask: Any) -> None:
        threads.add(threading.get_ident())
        original(self, mask)

    monkeypatch.setattr(GrammarMatcher, "fill", recording)
    pending = PendingMask(compiler, Grammar(GrammarKind.CHOICE, '["abc", "abd"]'), tokenizer.encode("a"))
    assert allowed(pending.wait()) == tokenizer.encode("b")
    pending.advance(tokenizer.encode("b")[0])
    assert sorted(allowed(pending.wait())) == sorted(tokenizer.encode("c") + tokenizer.encode("d"))
    assert threads and threading.get_ident() not in threads


def test_an_error_of_the_background_work_appears_in_every_wait(compiler: GrammarCompiler, tokenizer: Any) -> None:
    pending = PendingMask(compiler, Grammar(GrammarKind.REGEX, "ab"), tokenizer.encode("z"))
    for _ in range(2):
        with pytest.raises(RequestError):
            pending.wait()


def test_a_tokenizer_that_cannot_be_read_refuses_grammars_only_when_one_is_used() -> None:
    compiler = GrammarCompiler("{}", 100, (0,))
    with pytest.raises(Unsupported, match="tokenizer"):
        compiler.compile(Grammar(GrammarKind.REGEX, "a"))
    compiler.close()
