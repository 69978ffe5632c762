"""Messages of the OpenAI API in the shape that a chat template expects.

Owns how content is given to a template (text, or a list of parts), and the repair of what clients send: null fields,
arguments as JSON text, roles a template does not know. Knows no HTTP.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from jinja2 import nodes

from diptych.errors import RequestError, Unsupported

Json = Mapping[str, object]

# Types of content parts that are text, and the field that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ContentStyle(enum.Enum):
    """What a template takes as a message's content."""

    TEXT = "text"  # only text: lists of parts are joined
    PARTS = "parts"  # only lists of parts: text is wrapped
    EITHER = "either"  # it looks which one it got


def content_style(tree: nodes.Template) -> ContentStyle:
    """Whether a template loops over the parts of a message's content, and whether it asks for their type first."""
    aliases = _content_aliases(tree)
    if not any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For)):
        return ContentStyle.TEXT
    tests_type = any(test.name == "string" and _is_content(test.node, aliases) for test in tree.find_all(nodes.Test))
    return ContentStyle.EITHER if tests_type else ContentStyle.PARTS


def _content_aliases(tree: nodes.Template) -> set[str]:
    """Names that hold a message's content: set to it, or parameters of a macro that is called with it."""
    aliases: set[str] = set()
    while True:
        found = set(_assigned(tree, aliases)) | set(_passed(tree, aliases))
        if found <= aliases:
            return aliases
        aliases |= found


def _assigned(tree: nodes.Template, aliases: set[str]) -> Iterator[str]:
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
            yield assign.target.name


def _passed(tree: nodes.Template, aliases: set[str]) -> Iterator[str]:
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        for parameter, argument in zip(macro.args, call.args, strict=False):
            if _is_content(argument, aliases):
                yield parameter.name
        for keyword in call.kwargs:
            if _is_content(keyword.value, aliases):
                yield keyword.key


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    """Whether an expression is `x.content` or `x["content"]`, an alias, or one of those filtered or sliced."""
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == "content")
        return isinstance(node.arg, nodes.Slice) and _is_content(node.node, aliases)
    if isinstance(node, nodes.Filter):
        return node.name in ("selectattr", "rejectattr", "list", "reverse") and _is_content(node.node, aliases)
    return False


def prepare_messages(
    messages: Sequence[Json], style: ContentStyle, *, knows_developer: bool
) -> list[dict[str, object]]:
    """Messages for a template, as new dicts.

    Args: knows_developer: whether the template has a role "developer"; else it becomes "system".
    Raises: RequestError for a malformed message, Unsupported for content other than text; both name it.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_prepare(message, index, style, knows_developer) for index, message in enumerate(messages)]


def _prepare(message: Json, index: int, style: ContentStyle, knows_developer: bool) -> dict[str, object]:
    param = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{param} has no role", param="messages")
    # Templates ask whether a field is there, so that null must mean that it is not.
    prepared = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    prepared["role"] = "system" if role == "developer" and not knows_developer else role
    prepared["content"] = _content(message.get("content"), param, style)
    if "reasoning" in prepared:
        prepared.setdefault("reasoning_content", prepared["reasoning"])
    calls = message.get("tool_calls")
    if calls:
        prepared["tool_calls"] = _tool_calls(calls, param)
    return prepared


def _content(content: object, param: str, style: ContentStyle) -> object:
    if content is None:
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if style is ContentStyle.PARTS else content
    if not isinstance(content, list):
        raise RequestError(f"{param}.content must be text or a list of parts", param="messages")
    texts = [_part_text(part, f"{param}.content[{index}]") for index, part in enumerate(content)]
    if style is ContentStyle.TEXT:
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise RequestError(f"{param} must be an object with a type", param="messages")
    if kind not in _TEXT_PARTS:
        raise Unsupported(f"{param} is of type {kind!r:.100}; only text can be served", param="messages")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{param}.{_TEXT_PARTS[kind]} must be text", param="messages")
    return text


def _tool_calls(calls: object, param: str) -> list[dict[str, object]]:
    """Calls with their arguments as objects: the API has them as JSON text, templates print them as JSON."""
    if not isinstance(calls, list):
        raise RequestError(f"{param}.tool_calls must be a list", param="messages")
    prepared: list[dict[str, object]] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{param}.tool_calls[{index}] has no function with a name", param="messages")
        arguments = _arguments(function.get("arguments"))
        prepared.append({**call, "function": {**function, "arguments": arguments}})
    return prepared


def _arguments(arguments: object) -> object:
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments.encode() or b"{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments  # a model wrote it badly: show it as it was
