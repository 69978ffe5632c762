from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diptych.core.request import Grammar, GrammarKind
from diptych.errors import RequestError
from diptych.sampling.grammar_check import MAX_GRAMMAR_NBYTES, grammar_source, validate_grammar

JSON, REGEX, EBNF, CHOICE = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.CHOICE

GOOD = [
    (JSON, '{"type": "object"}'),
    (JSON, "true"),
    (JSON, json.dumps({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"})),
    (REGEX, r"\d{3}-[a-z]+"),
    (EBNF, 'root ::= "a" | b\nb ::= [0-9]+ # digits\n'),
    (EBNF, 'root ::= item # first\n  # second\n  | "x|y" item\n  | "[" item "]"\nitem ::= "\\u00e9" [^"\\\\]\n'),
    (EBNF, 'start: "a" B\nB: /[0-9]+/'),
    (CHOICE, '["yes", "no", "\\u00e9\\"\\\\ \\n"]'),
]

BAD = [
    (JSON, "{bad", "property name"),
    (JSON, "[]", "object or a boolean"),
    (JSON, '{"type": 5}', "type must be"),
    (JSON, '{"$ref": "#/nope"}', "/nope"),
    (JSON, '{"enum": []}', "Unsatisfiable"),
    (JSON, "false", "Unsatisfiable"),
    (JSON, '{"a":' * 100_000 + "1" + "}" * 100_000, "limit|nested too deeply"),
    (JSON, "[" * 90_000, "nested too deeply"),
    (REGEX, "(a", "unclosed group"),
    (REGEX, "a(?=b)", "look-around"),
    (REGEX, "(" * 20_000 + "a" + ")" * 20_000, "nest"),
    (REGEX, "\ud800", "surrogates"),
    (EBNF, "", "root"),
    (EBNF, "x", "::="),
    (EBNF, "root ::= foo", "foo"),
    (EBNF, "root ::= " + "(" * 25_000 + '"a"' + ")" * 25_000, "nested too deeply"),
    (EBNF, "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000, "exceed the limits"),
    (EBNF, "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(600)), "600 rules|601 rules"),
    (EBNF, "root ::= " + '"' + '\\"' * 30_000, "end of input"),
    (EBNF, "root ::= " + "\n" * 60_000 + "]", "::=|name"),
    (EBNF, "start: foo", "unknown name"),
    (EBNF, 'root ::= "\\Uffffffff"', "not a Unicode character"),
    (CHOICE, "[]", "non-empty list"),
    (CHOICE, '["a", 1]', "non-empty list"),
    (CHOICE, "{", "property name"),
    (REGEX, "a" * (MAX_GRAMMAR_NBYTES + 1), "limit"),
]


@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_good_grammars_pass(kind: GrammarKind, text: str) -> None:
    validate_grammar(Grammar(kind, text))


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=range(len(BAD)))
def test_bad_grammars_are_request_errors_of_one_line(kind: GrammarKind, text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        validate_grammar(Grammar(kind, text))
    message = str(raised.value)
    assert raised.value.param == "grammar"
    assert kind.value in message
    assert len(message) < 400
    assert "\n" not in message


def chained_schema(length: int) -> str:
    links = {f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(length)}
    return json.dumps({"$defs": {**links, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"})


def chained_rules(length: int) -> str:
    rules = "\n".join(f'a{n}: "p" a{n + 1} "q"' for n in range(length))
    return f'start: a0\n{rules}\na{length}: "x"'


def test_long_chains_of_references_neither_crash_nor_pass_unbounded() -> None:
    """The library alone overflows the stack and ends the process at these lengths."""
    validate_grammar(Grammar(JSON, chained_schema(1300)))
    validate_grammar(Grammar(EBNF, chained_rules(7000)))
    for kind, text in ((JSON, chained_schema(5000)), (EBNF, chained_rules(9000))):
        with pytest.raises(RequestError, match="levels deep"):
            validate_grammar(Grammar(kind, text))


def test_lark_passes_through_and_gbnf_is_converted() -> None:
    lark = 'start: "a"'
    assert grammar_source(Grammar(EBNF, lark)) == lark
    converted = grammar_source(Grammar(EBNF, 'root ::= "a"\n | "b" # c\n'))
    assert "start:" in converted
    assert '"b"' in converted
    assert "# c" not in converted


def test_the_check_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, diptych.sampling.grammar_check as g; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
