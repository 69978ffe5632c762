"""Structured-output constraints as llguidance understands them, checked without a tokenizer.

Owns the translation of a Grammar and the bounds that keep a hostile one from hurting the process: size, recursion depth
and the stack it is compiled on. Used by the server before a request is queued. Never imports torch.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from diptych.core.request import Grammar, GrammarKind
from diptych.errors import RequestError

MAX_GRAMMAR_NBYTES = 512 * 1024
MAX_GBNF_NBYTES = 64 * 1024
MAX_GBNF_RULES = 500
MAX_GRAMMAR_DEPTH = 8000
"""Bound on nested references. llguidance recurses and would overflow an 8 MiB stack at about 1000 levels."""

LIMITS = LLParserLimits(verbose_errors=False)

_STACK_NBYTES = 256 * 1024 * 1024  # address space; only touched pages take memory
_STACK_LOCK = threading.Lock()
_MAX_MESSAGE_LEN = 300
# Unbounded white space is where a small model gets lost for ever; a schema's "x-guidance" may allow more.
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"

Result = TypeVar("Result")


@functools.lru_cache(maxsize=64)
def validate_grammar(grammar: Grammar) -> None:
    """Raise RequestError if the grammar cannot be compiled; costs about a millisecond, 0.2 s at worst."""
    source = grammar_source(grammar)
    message = on_deep_stack(lambda: LLMatcher.validate_grammar(source, None, limits=LIMITS))
    if message and not message.startswith("WARNING"):
        raise grammar_error(grammar, message)


def grammar_source(grammar: Grammar) -> str:
    """The grammar in llguidance's own format. Raises RequestError for text that is too large, too deep or malformed."""
    if len(grammar.text) > MAX_GRAMMAR_NBYTES:
        raise grammar_error(grammar, f"{len(grammar.text)} characters exceed the limit of {MAX_GRAMMAR_NBYTES}")
    try:
        grammar.text.encode()
        return _SOURCES[grammar.kind](grammar)
    except RecursionError:
        raise grammar_error(grammar, "it is nested too deeply") from None
    except RequestError:
        raise
    except Exception as error:  # the GBNF converter raises bare Exception
        raise grammar_error(grammar, str(error)) from None


def grammar_error(grammar: Grammar, message: str) -> RequestError:
    """A RequestError that names the kind of grammar and gives the first line of the library's message."""
    first_line = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    if "regex parse error" in first_line:  # the reason is on the line that begins with "error:"
        reason = re.search(r"^error: (.*)$", message, re.MULTILINE)
        first_line = f"{reason.group(1)}" if reason else first_line
    return RequestError(f"invalid {grammar.kind.value} grammar: {first_line[:_MAX_MESSAGE_LEN]}", param="grammar")


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """Run `function` on a thread whose stack is deep enough for any grammar within the limits; returns its result."""
    with ThreadPoolExecutor(1) as pool:
        with _STACK_LOCK:
            previous = threading.stack_size(_STACK_NBYTES)
            try:
                future = pool.submit(function)
            finally:
                threading.stack_size(previous)
        return future.result()


def _json_schema_source(grammar: Grammar) -> str:
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict | bool):
        raise grammar_error(grammar, f"a schema must be an object or a boolean, got {type(schema).__name__}")
    if schema is False:
        raise grammar_error(grammar, "Unsatisfiable: the schema is false")
    schema = {} if schema is True else schema  # the library applies options to objects only
    depth, references = _schema_extent(schema)
    _check_depth(grammar, depth * (len(references) + 1))
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _JSON_WHITESPACE})


def _schema_extent(schema: object) -> tuple[int, set[str]]:
    """Nesting depth of a JSON value, and the distinct targets of its $refs."""
    deepest, references = 0, set()
    open_values: list[tuple[object, int]] = [(schema, 1)]
    while open_values:
        value, depth = open_values.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                references.add(reference)
            open_values += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            open_values += [(child, depth + 1) for child in value]
    return deepest, references


def _regex_source(grammar: Grammar) -> str:
    return LLMatcher.grammar_from_regex(grammar.text)


def _choice_source(grammar: Grammar) -> str:
    choices = json.loads(grammar.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise grammar_error(grammar, "choices must be a non-empty list of strings")
    literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(literals))


def _ebnf_source(grammar: Grammar) -> str:
    """Lark syntax (a rule `start:`) as it is; GBNF and the EBNF of other engines (a rule `root ::=`) converted."""
    if _LARK_START.search(grammar.text):
        lark = grammar.text
    else:
        _check_gbnf_size(grammar)
        lark = gbnf_to_lark(_plain_gbnf(grammar.text))
    _check_depth(grammar, sum(lark.count(opening) for opening in "([{:"))
    return LLMatcher.grammar_from_lark(lark)


# The library's own test for this takes time quadratic in the number of empty lines.
_LARK_START = re.compile(r"^[ \t]*+(?:%llguidance\b|start[ \t]*+:(?!:))", re.MULTILINE)
# A literal or a character class; one that is not closed runs to the end, which keeps the search linear.
_GBNF_QUOTED = r'"(?:\\.|[^"\\])*+"?|\[(?:\\.|[^\]\\])*+\]?'
_GBNF_TOKEN = re.compile(_GBNF_QUOTED + r"|#[^\n]*", re.DOTALL)
_GBNF_CONTINUATION = re.compile(_GBNF_QUOTED + r"|\s++\|?", re.DOTALL)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def _plain_gbnf(text: str) -> str:
    """GBNF that the converter reads: no comments, alternatives on their rule's line, no numeric escapes."""
    text = _GBNF_TOKEN.sub(lambda match: "" if match[0][0] == "#" else _GBNF_ESCAPE.sub(_character, match[0]), text)
    return _GBNF_CONTINUATION.sub(_joined, text)


def _joined(match: re.Match[str]) -> str:
    is_continuation = match[0][0] not in '"[' and match[0][-1] == "|"
    return " |" if is_continuation else match[0]


def _character(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > sys.maxunicode:
        raise ValueError(f"{match[0]} is not a Unicode character")
    character = chr(code)
    return character if character.isalnum() else match[0]


def _check_gbnf_size(grammar: Grammar) -> None:
    """The converter is plain Python and takes time quadratic in the number of rules."""
    num_rules = grammar.text.count("::=")
    if len(grammar.text) > MAX_GBNF_NBYTES or num_rules > MAX_GBNF_RULES:
        raise grammar_error(
            grammar,
            f"{len(grammar.text)} characters and {num_rules} rules exceed the limits of {MAX_GBNF_NBYTES} and "
            f"{MAX_GBNF_RULES}; write it in Lark syntax (start: ...) to go beyond",
        )


def _check_depth(grammar: Grammar, depth: int) -> None:
    if depth > MAX_GRAMMAR_DEPTH:
        raise grammar_error(
            grammar, f"rules or references may nest {depth} levels deep, above the limit of {MAX_GRAMMAR_DEPTH}"
        )


_SOURCES: dict[GrammarKind, Callable[[Grammar], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema_source,
    GrammarKind.REGEX: _regex_source,
    GrammarKind.EBNF: _ebnf_source,
    GrammarKind.CHOICE: _choice_source,
}
