"""Chat templates: Hugging Face's conventions, the plain template, what clients send wrongly, and runaway templates."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import ConfigError, RequestError, Unsupported
from diptych.server.chat import ChatTemplate, read_template
from diptych.server.messages import ContentStyle
from diptych.server.templates import MAX_STEPS

USER = {"role": "user", "content": "Hi"}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<\u00e9t\u00e9>"}}]

CHATML = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

ALWAYS_PARTS = """{% for m in messages %}{{ m.role }}:
{%- for part in m['content'] %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %};
{%- endfor %}"""

EITHER = """{% macro show(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}{{ m.role }}:{{ show(m.content) }};{% endfor %}"""

ALIASED = """{% for m in messages %}{% set body = m['content'] %}
{%- for part in body | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"""


def render(source: str | None, messages: list[dict[str, object]] | None = None, **options: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages or [USER], **options).text  # type: ignore[arg-type]


@cache
def template_of(source: str | None) -> ChatTemplate:
    return ChatTemplate(source)


def test_chatml_as_hugging_face_renders_it() -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER]
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, messages) == expected
    assert not render(CHATML, messages, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ tools | tojson }}", json.dumps(TOOLS, ensure_ascii=False)),
        ("{{ tools[0] | tojson(indent=2) }}", json.dumps(TOOLS[0], ensure_ascii=False, indent=2)),
        ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{{ thinking }}{{ documents[0].title }}", "TrueDoc"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% for m in messages[::-1] %}{{ loop.last }}{{ loop.length }}{{ m.content ~ '!' }}{% endfor %}", "True1Hi!"),
        ("{% for k, v in tools[0].function.items() %}{{ k }} {% endfor %}", "name description "),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
    ],
)
def test_conventions_of_hugging_face_templates(source: str, expected: str) -> None:
    options = {"tools": TOOLS, "documents": [{"title": "Doc"}], "template_kwargs": {"thinking": True}}
    assert render(source, **options) == expected


def test_templates_render_as_transformers_renders_them() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [USER, {"role": "assistant", "content": "A <b>\u00e9</b>"}, USER]
    for source in (
        CHATML,
        EITHER,
        "{{ messages | tojson }}{% for m in messages %}\n  {% if loop.first %}\n x\n {% endif %}\n{% endfor %}",
    ):
        expected, _ = render_jinja_template(conversations=[messages], chat_template=source, add_generation_prompt=True)
        assert render(source, messages) == expected[0]


def test_special_tokens_are_the_templates_business() -> None:
    assert ChatTemplate(CHATML).render([USER]).add_special_tokens is False
    assert ChatTemplate(None).render([USER]).add_special_tokens is True


def test_the_plain_template() -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Hello."}, USER]
    assert render(None, messages) == "Be kind.\n\nUser:\nHi\n\nAssistant:\nHello.\n\nUser:\nHi\n\nAssistant:\n"
    template = ChatTemplate(None)
    assert template.is_plain and "\nUser:" in template.default_stop
    assert ChatTemplate(CHATML).default_stop == ()


def test_the_plain_template_shows_tools_calls_and_results() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "\u00e9"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    text = render(None, messages, tools=TOOLS)
    assert '{"name": "f", "description": "<\u00e9t\u00e9>"}' in text
    assert 'Assistant:\n<tool_call>{"name": "f", "arguments": {"x": "\u00e9"}}</tool_call>\n\nResult:\n3\n\n' in text


@pytest.mark.parametrize(
    ("source", "style"),
    [
        (CHATML, ContentStyle.TEXT),
        (ALWAYS_PARTS, ContentStyle.PARTS),
        (EITHER, ContentStyle.EITHER),
        (ALIASED, ContentStyle.PARTS),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", ContentStyle.TEXT),
        ("{% for line in messages[0].content.split('x') %}{{ line }}{% endfor %}", ContentStyle.TEXT),
    ],
)
def test_detects_what_a_template_takes_as_content(source: str, style: ContentStyle) -> None:
    assert ChatTemplate(source).content_style is style


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        ("{{ messages[0].content }}", "Hi", "one\ntwo"),
        (ALWAYS_PARTS, "user:[Hi];", "user:[one][two];"),
        (EITHER, "user:Hi;", "user:[one][two];"),
        (ALIASED, "Hi", "onetwo"),
    ],
)
def test_content_is_given_as_the_template_takes_it(source: str, text: str, parts: str) -> None:
    assert render(source) == text
    assert render(source, [{"role": "user", "content": PARTS}]) == parts


def test_null_fields_are_absent_and_arguments_are_objects() -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    calls = [{"id": "1", "function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "", "{bad")]
    message = {"role": "assistant", "content": None, "tool_calls": calls, "name": None, "reasoning": "Hm."}
    shown = json.loads(render(source, [message]))
    assert [call["function"]["arguments"] for call in shown["tool_calls"]] == [{"a": 1}, {}, "{bad"]
    assert (shown["content"], shown["reasoning_content"]) == ("", "Hm.")
    assert "name" not in shown
    assert "tool_calls" not in json.loads(render(source, [{**USER, "tool_calls": []}]))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


@pytest.mark.parametrize(
    "source", [CHATML, ALWAYS_PARTS, EITHER, None, "{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}"]
)
def test_the_final_message_can_be_continued(source: str | None) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    text = render(source, messages, continue_final_message=True)
    assert text.endswith("Once upon")
    assert render(source, messages, add_generation_prompt=False).startswith(text)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", [USER, {"role": "assistant", "content": "x"}]),
        (ALWAYS_PARTS, [{"role": "assistant", "content": []}]),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, messages: list[dict[str, object]]) -> None:
    with pytest.raises(RequestError, match="content"):
        render(source, messages, continue_final_message=True)


def test_the_templates_own_complaint_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages.absent.deeper }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].pop('role') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 3 | length }}",
    ],
)
def test_what_goes_wrong_in_a_template_is_a_request_error(source: str) -> None:
    try:
        template = ChatTemplate(source)
    except ConfigError:
        return  # found out even earlier
    with pytest.raises(RequestError):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 100000000 }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% for i in range(90000) %}{{ messages[0].content * 1000 }}{% endfor %}",
    ],
)
def test_a_runaway_template_is_stopped(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match="chat template"):
        render(source)
    assert time.perf_counter() - start < 20


def test_many_messages_are_no_runaway() -> None:
    assert MAX_STEPS > 200_000
    assert len(render(CHATML, [USER] * 50_000)) > 1_000_000


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "empty"),
        ([{"content": "x"}], "role"),
        ([{"role": 3, "content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "content"),
        ([{"role": "user", "content": [3]}], "type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text"),
        ([{"role": "assistant", "tool_calls": 3}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "name"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
@pytest.mark.parametrize("source", [None, CHATML])
def test_malformed_messages_are_request_errors(
    source: str | None, messages: list[dict[str, object]], match: str
) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        ChatTemplate(source).render(messages)
    assert caught.value.param == "messages"
    assert isinstance(caught.value, Unsupported) == ("only text" in match)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "x"])},
    optional={"content": JSON, "tool_calls": JSON, "name": JSON, "reasoning": JSON},
)


@pytest.mark.parametrize("source", [None, CHATML, EITHER, ALWAYS_PARTS])
@settings(max_examples=60, deadline=None)
@given(messages=st.lists(MESSAGE, max_size=3), final=st.booleans())
def test_any_json_is_a_prompt_or_a_request_error(
    source: str | None, messages: list[dict[str, object]], final: bool
) -> None:
    try:
        prompt = template_of(source).render(messages, continue_final_message=final)
    except RequestError:
        return
    prompt.text.encode()


def test_reserved_variables_cannot_be_overridden() -> None:
    with pytest.raises(RequestError, match="tools") as caught:
        render(CHATML, template_kwargs={"tools": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_a_template_is_named_by_its_text_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(CHATML)
    assert read_template(str(file)) == read_template(CHATML) == CHATML
    with pytest.raises(ConfigError, match="cannot read"):
        read_template(str(tmp_path / "absent.jinja"))
