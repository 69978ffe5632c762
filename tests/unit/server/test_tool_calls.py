"""Tool call formats: what they read, that nothing is lost, and that pieces give what the whole gives."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.request import GrammarKind
from diptych.errors import RequestError
from diptych.server.tool_calls import (
    FORMATS,
    ContentDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
    collect,
    detect_parser,
    make_parser,
    new_call_id,
    tool_choice_parser,
    tool_choice_schema,
)

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def make(name: str) -> ToolCallParser:
    """A parser whose calls are named 0, 1, ..."""
    numbers = itertools.count()
    if name in FORMATS:
        return make_parser(name, lambda: str(next(numbers)))
    parser = tool_choice_parser(TOOLS, NAMED if name == "named" else name, lambda: str(next(numbers)))
    assert parser is not None
    return parser


CASES = [
    ("hermes", "Hello  ", "Hello  ", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1.10}}\n</tool_call>', "", [("f", '{"x": 1.10}')]),
    (
        "hermes",
        'Sure.\n<tool_call>{"name":"f","arguments":{"x":"}</tool_call>"}}</tool_call>\n\n<tool_call>'
        '{"arguments":{},"name":"g"}</tool_call>\nDone. ',
        "Sure.\nDone. ",
        [("f", '{"x":"}</tool_call>"}'), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name":"f","parameters":{"a":[1,{"b":"\\""}]}}', "", [("f", '{"a":[1,{"b":"\\""}]}')]),
    ("hermes", '<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        "llama3",
        ' <|python_tag|> {"name":"f","parameters":{}}; {"name":"g","arguments":{}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "llama3",
        '{"name":"f","parameters":{}}\n<|python_tag|>{"name":"g","parameters":{}} ok',
        " ok",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama3", 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ("llama3", 'So:\n<|python_tag|>{"name":"f","parameters":{}}', "So:", [("f", "{}")]),
    ("llama3", '{"name": "Ann", "age": 3}; fine', '{"name": "Ann", "age": 3}; fine', []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3", '{"name":"f","parameters":{}};', ";", [("f", "{}")]),
    (
        "mistral",
        'Ok [TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": {}}]',
        "Ok",
        [("f", '{"x": "]"}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g.h-1[ARGS] {}', "", [("f", '{"x": 1}'), ("g.h-1", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', "", [("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS]{"name":"f","arguments":{}}', "", [("f", "{}")]),
    ("named", ' {"city": "Bern"}\n', "", [("weather", '{"city": "Bern"}')]),
    ("named", '{"city": "Be', "", [("weather", '{"city": "Be')]),
    ("named", "", "", []),
    (
        "required",
        '[{"name": "weather", "parameters": {"city": "{]"}},\n {"name":"time","parameters":{}}]',
        "",
        [("weather", '{"city": "{]"}'), ("time", "{}")],
    ),
    ("required", '[{"name": "weather", "parameters": {"city": "B', "", [("weather", '{"city": "B')]),
    ("required", '[{"name": "weat', '[{"name": "weat', []),
    ("required", "I would rather not.", "I would rather not.", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_reads_content_and_calls(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = [ToolCall(str(index), function, arguments) for index, (function, arguments) in enumerate(calls)]
    assert make(name).parse(text) == (content, expected)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_character_by_character_gives_the_same(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert stream(make(name), list(text)) == make(name).parse(text)


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "cut'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": ""}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "later"}</tool_call>'),
    ("hermes", "<tool_call>f(x)</tool_call>"),
    ("hermes", "<tool_call>  "),
    ("hermes", "a <tool_cal"),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}</tool_call>"),
    ("llama3", '{"name": "f", "parameters": {"x": 1}'),
    ("llama3", '{"name": "f"}'),
    ("llama3", "  {}} "),
    ("llama3", "<|python_"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {]'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]f[ARGS]x"),
    ("mistral", "[TOOL_CALLS]f[AR"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID][ARGS]{}"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1,}'),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_malformed_stays_content_to_the_last_character(name: str, text: str) -> None:
    assert make(name).parse(text) == (text, [])
    assert stream(make(name), list(text)) == (text, [])


def test_a_good_call_after_a_bad_one_is_read() -> None:
    bad, good = '<tool_call>{"name": f}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'
    content, calls = make("hermes").parse(bad + good)
    assert (content, [call.name for call in calls]) == (bad, ["f"])


def test_ids_written_by_the_model_are_kept() -> None:
    _, calls = make("mistral").parse(
        '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}[TOOL_CALLS] [{"name":"g","id":"ninechars"}]'
    )
    assert [call.call_id for call in calls] == ["abc123XYZ", "ninechars"]
    assert len(new_call_id()) == 9 and new_call_id() != new_call_id()


def stream(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    deltas = [delta for piece in pieces for delta in parser.stream(piece)] + parser.finish()
    for delta in deltas:
        assert isinstance(delta, ToolCallDelta) or delta.text
    return collect(deltas)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool", "[TOOL", "<|"),
    *('{"name":"f","arguments":{}}', '{"name": "g", "parameters": {"x": "<tool_call>"}}', '{"name":"f"}', "f", "x9"),
    *("{", "}", "[", "]", '"', "\\", ",", ";", ":", '"name"', '"parameters"', " ", "\n", "Hello", "\u00e9\U0001f600"),
]
SOUP = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@pytest.mark.parametrize("name", [*FORMATS, "named", "required"])
@settings(max_examples=150, deadline=None)
@given(text=SOUP, data=st.data())
def test_any_split_gives_what_the_whole_text_gives(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    whole = make(name).parse(text)
    assert stream(make(name), pieces) == whole
    assert stream(make(name), list(text)) == whole
    if name in FORMATS and not whole[1]:
        assert whole[0] == text
    if name in FORMATS:
        for call in whole[1]:
            assert isinstance(json.loads(call.arguments), dict)


WRITERS = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{dump(n, a, 'arguments')}\n</tool_call>" for n, a in calls),
    "llama3": lambda calls: "; ".join(dump(n, a, "parameters") for n, a in calls),
    "mistral": lambda calls: "[TOOL_CALLS] [" + ", ".join(dump(n, a, "arguments") for n, a in calls) + "]",
    "required": lambda calls: "[" + ", ".join(dump(n, a, "parameters") for n, a in calls) + "]",
}


def dump(name: str, arguments: dict[str, object], key: str) -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab<>[]{}"\\', max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["weather", "time"]), st.dictionaries(st.text("xy", max_size=2), VALUES)), min_size=1
)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40, deadline=None)
@given(calls=CALLS, data=st.data())
def test_written_calls_are_read_back_verbatim(
    name: str, calls: list[tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    text = WRITERS[name](calls)
    size = data.draw(st.integers(1, 20))
    content, found = stream(make(name), [text[start : start + size] for start in range(0, len(text), size)])
    assert content == ""
    assert [(call.name, call.arguments) for call in found] == [(n, json.dumps(a, ensure_ascii=False)) for n, a in calls]


def test_content_streams_at_once_except_what_could_be_a_marker() -> None:
    parser = make("hermes")
    assert parser.stream("Hello wor") == [ContentDelta("Hello wor")]
    assert parser.stream("ld <tool") == [ContentDelta("ld")]
    assert parser.stream("s>") == [ContentDelta(" <tools>")]


def test_forced_calls_stream_their_arguments() -> None:
    parser = make("required")
    assert parser.stream('[{"name": "weather", "para') == []
    assert parser.stream('meters": {"ci') == [
        ToolCallDelta(0, "0", "weather", ""),
        ToolCallDelta(0, None, None, '{"ci'),
    ]
    assert parser.stream('ty": 1}') == [ToolCallDelta(0, None, None, 'ty": 1}')]
    assert parser.stream("}]") == [] and parser.finish() == []


def test_a_long_call_takes_linear_time() -> None:
    parser = make("hermes")
    text = '<tool_call>{"name": "f", "arguments": {"code": "' + "x = 1\\n" * 20_000 + '"}}</tool_call>'
    start = time.perf_counter()
    _, calls = stream(parser, [text[position : position + 4] for position in range(0, len(text), 4)])
    assert len(calls) == 1
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{% for tool in tools %}<tool_call>{{ x }}</tool_call>{% endfor %}", "hermes"),
        ("<tool_call>\n<function=name>", "none"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('{{ "<|python_tag|>" }}', "llama3"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
            "llama3",
        ),
        ("{{ messages }}", "none"),
    ],
)
def test_detects_the_format_by_the_template(template: str | None, name: str) -> None:
    assert detect_parser(template) == name


def test_only_mistral_needs_special_tokens() -> None:
    assert [name for name in FORMATS if make(name).needs_special_tokens] == ["mistral"]


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_choices_that_force_nothing(choice: str | None) -> None:
    assert tool_choice_schema(TOOLS, choice) is None
    assert tool_choice_parser(TOOLS, choice) is None


def test_a_named_choice_is_the_functions_own_schema() -> None:
    grammar = tool_choice_schema(TOOLS, NAMED)
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.text) == {"type": "object", "properties": {"city": {}}}


def test_required_is_an_array_of_calls_with_definitions_hoisted() -> None:
    point = {"$ref": "#/$defs/Point", "description": "see #/$defs/Point"}
    parameters = {
        "type": "object",
        "properties": {"at": point},
        "$defs": {"Point": {"items": {"$ref": "#/$defs/Point"}}},
    }
    tools = [TOOLS[1], {"type": "function", "function": {"name": "go", "parameters": parameters}}]
    grammar = tool_choice_schema(tools, "required", parallel=False)
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    time_call, go_call = schema["items"]["anyOf"]
    assert time_call["properties"] == {"name": {"enum": ["time"]}, "parameters": {"type": "object"}}
    at = go_call["properties"]["parameters"]["properties"]["at"]
    assert at == {"$ref": "#/$defs/1.Point", "description": "see #/$defs/Point"}
    assert schema["$defs"] == {"1.Point": {"items": {"$ref": "#/$defs/1.Point"}}}
    assert "maxItems" not in json.loads(tool_choice_schema(tools, "required").text)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "missing"}}, "tool_choice"),
        ([{"type": "function"}], "required", "tools"),
        ([{"function": {"name": "f", "parameters": 3}}], "required", "tools"),
        ([{"function": {"name": "f", "parameters": {"$ref": "#/elsewhere"}}}], "required", "tools"),
    ],
)
def test_wrong_choices_name_their_field(tools: list[dict[str, object]], choice: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        tool_choice_schema(tools, choice)
    assert caught.value.param == param


def test_a_schema_nested_too_deeply_is_a_request_error() -> None:
    schema: dict[str, object] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError):
        tool_choice_schema([{"function": {"name": "f", "parameters": schema}}], "required")
