"""Chat messages to prompt text, with the model's Jinja template or a plain one of ours.

Owns the variables that Hugging Face templates expect and decides how a prompt ends. Must not
know of tokenizers or HTTP. A template comes with the model and is trusted as far as the model is: the sandbox keeps it
from our objects, the bounds keep an accident from blocking the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from diptych.errors import ConfigError, RequestError
from diptych.server.messages import ContentStyle, Json, content_style, prepare_messages
from diptych.server.templates import compile_template, parse_template, render_template

PLAIN_TEMPLATE = """\
{%- if tools %}
{{- 'These functions can be called:\\n' }}
{%- for tool in tools %}{{ tool.function | tojson }}{{ '\\n' }}{% endfor %}
{{- 'To call one, answer only with <tool_call>{"name": ..., "arguments": {...}}</tool_call>\\n\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content + '\\n\\n' }}
{%- else %}
{{- {'user': 'User', 'assistant': 'Assistant', 'tool': 'Result'}[message.role] or (message.role | capitalize) }}
{{- ':\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"""

PLAIN_STOPS = ("\n\nUser:", "\nUser:")
"""A base model goes on and writes the user's next turn too."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

# Whatever a template does to the last message's content, the prompt ends where this stands in its output.
_CUT_MARK = "@@the-prompt-ends-here@@"

# What expressions over a client's values can raise, besides Jinja's own errors.
_RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Prompt text. add_special_tokens: whether the tokenizer must still add BOS (templates write their own)."""

    text: str
    add_special_tokens: bool


class ChatTemplate:
    """A compiled chat template.

    Args: source: Jinja text; None takes the plain template. special_tokens: by Hugging Face's names ("bos_token").
    Raises: ConfigError for a template that does not compile.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self.is_plain = source is None
        self.source = PLAIN_TEMPLATE if source is None else source
        self.default_stop: tuple[str, ...] = PLAIN_STOPS if source is None else ()
        """Stop strings to add to those of a chat request; only the plain template has any."""
        self._special_tokens = dict(special_tokens or {})
        try:
            tree = parse_template(self.source)
            self.content_style: ContentStyle = content_style(tree)
            self._template = compile_template(tree)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(
                f"the chat template does not compile: {error}; give another with --chat-template"
            ) from error

    def render(
        self,
        messages: Sequence[Json],
        *,
        tools: Sequence[Json] | None = None,
        documents: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> RenderedPrompt:
        """The prompt of a chat. `continue_final_message` ends it inside the last message, where the model goes on.

        Args: template_kwargs: more variables for the template (`chat_template_kwargs`).
        Raises: RequestError for messages that are malformed or that the template refuses; Unsupported for content other
        than text.
        """
        kwargs = dict(template_kwargs or {})
        if reserved := sorted(RESERVED & kwargs.keys()):
            raise RequestError(f"chat_template_kwargs must not set {reserved[0]!r}", param="chat_template_kwargs")
        prepared = prepare_messages(messages, self.content_style, knows_developer="developer" in self.source)
        if continue_final_message:
            _mark_end(prepared[-1])
        variables: dict[str, object] = {
            **self._special_tokens,
            **kwargs,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        text = self._render(variables)
        if continue_final_message:
            text = _cut(text)
        return RenderedPrompt(text, add_special_tokens=self.is_plain)

    def _render(self, variables: dict[str, object]) -> str:
        try:
            text = render_template(self._template, variables)
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("messages hold half of a surrogate pair, which is no text", param="messages") from None
        except SecurityError as error:
            raise RequestError(f"the chat template was stopped: {error}", param="messages") from error
        except _RENDER_ERRORS as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return text


def _mark_end(message: dict[str, object]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CUT_MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += _CUT_MARK
    else:
        raise RequestError("continue_final_message needs a last message with text content", param="messages")


def _cut(text: str) -> str:
    position = text.rfind(_CUT_MARK)
    if position < 0:
        raise RequestError(
            "the chat template does not show the last message's content, so that it cannot be continued",
            param="continue_final_message",
        )
    return text[:position]


def read_template(value: str) -> str:
    """The template that the user named: Jinja text as it is, or the content of a file.

    Raises: ConfigError if it is neither.
    """
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {value!r}: {error}; give a file or Jinja text") from error
