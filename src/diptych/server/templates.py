"""A Jinja sandbox with the conventions of Hugging Face chat templates, and bounds on what a rendering may cost.

Owns the environment, its globals and filters, and the counting of steps. Knows nothing of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import NoReturn

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 300_000
"""Loop rounds and calls in one rendering; a few seconds of calls."""
MAX_CHARACTERS = 64 * 1024 * 1024
"""Longest text that a rendering may build."""

_BUDGET = "_diptych_budget"


class _Budget:
    """Steps left to one rendering."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def spend(self, num_steps: int) -> None:
        self._num_left -= num_steps
        if self._num_left < 0:
            raise SecurityError(f"it took more than {MAX_STEPS} steps")


def _budget(context: Context) -> _Budget:
    budget = context.resolve(_BUDGET)
    return budget if isinstance(budget, _Budget) else _Budget()


@pass_context
def _bounded(context: Context, iterable: Iterable[object]) -> list[object]:
    """What a for loop runs over; each item is a step."""
    items = list(iterable)
    _budget(context).spend(len(items))
    return items


@pass_context
def _concatenated(context: Context, values: list[object]) -> str:
    """The operator `~`."""
    texts = [str(value) for value in values]
    _budget(context).spend(1)
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise SecurityError(f"it built more than {MAX_CHARACTERS} characters")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as prompts want it: no HTML escapes (Jinja's own filter makes them)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Counts calls as steps, and refuses operators whose result would be huge."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call(self, context: Context, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        _budget(context).spend(1)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _check_length(len(left) + len(right))
        elif operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(factor, int):
                    _check_length(len(sequence) * factor)
        if isinstance(left, int) and isinstance(right, int) and operator != "+":
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            _check_length(bits * 64)
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Leads every loop and every `~` through a filter that counts."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, "_concatenated", [], [], None, None, lineno=node.lineno)


def _make_environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters |= {"tojson": _tojson, "_bounded": _bounded, "_concatenated": _concatenated}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_environment = _make_environment()


def parse_template(source: str) -> nodes.Template:
    """The template's tree. Raises: TemplateError."""
    return _environment.parse(source)


def compile_template(tree: nodes.Template) -> Template:
    """A template whose loops, calls and texts are bounded; changes `tree`. Raises: TemplateError."""
    _Bounds().visit(tree)
    tree.set_environment(_environment)
    code = _environment.compile(tree)
    return Template.from_code(_environment, code, _environment.globals)


def render_template(template: Template, variables: dict[str, object]) -> str:
    """The template's text. Raises: SecurityError beyond the bounds, and whatever the template raises."""
    pieces: list[str] = []
    length = 0
    for piece in template.generate(variables | {_BUDGET: _Budget()}):
        pieces.append(piece)
        length += len(piece)
        _check_length(length)
    return "".join(pieces)
