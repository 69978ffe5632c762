"""What the routes of one server share: its configuration, and the service once the engine is ready."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from diptych.config import EngineConfig
from diptych.core.messages import AdapterInfo, EngineInfo
from diptych.errors import RequestError, Unavailable, UnknownModel
from diptych.metrics import ServerMetrics
from diptych.resolve import parse_size
from diptych.server.adapters import ServedAdapters
from diptych.server.chat import ChatTemplate, RenderedPrompt, read_template
from diptych.server.client import EngineClient
from diptych.server.generation import GenerationService
from diptych.server.matchmaker import Matchmaker
from diptych.server.schemas import ChatRequest, TokenizeRequest
from diptych.server.token_texts import TokenTexts
from diptych.server.tool_calls import detect_parser
from diptych.tokenizer import Tokenizer, load_tokenizer

# What clients and routers write if the user named no model.
_ANY_MODEL = frozenset({"", "default", "unknown"})
MAX_REQUEST_ID_LEN = 256
_INLINE_MESSAGES = 64


@dataclass(frozen=True, kw_only=True)
class TextTools:
    """What turns the client's words into tokens and back. tool_call_parser: "none" or one of `tool_calls.FORMATS`."""

    tokenizer: Tokenizer
    token_texts: TokenTexts
    chat_template: ChatTemplate
    tool_call_parser: str


def load_text_tools(config: EngineConfig) -> TextTools:
    """Read tokenizer and chat template; takes a second or two. Raises: ConfigError."""
    tokenizer = load_tokenizer(config.model.model_path, config.model.tokenizer_path)
    given = config.server.chat_template
    source = tokenizer.chat_template if given is None else read_template(given)
    parser = config.server.tool_call_parser
    return TextTools(
        tokenizer=tokenizer,
        token_texts=TokenTexts(tokenizer),
        chat_template=ChatTemplate(source, tokenizer.special_tokens),
        tool_call_parser=detect_parser(source) if parser == "auto" else parser,
    )


def tool_dicts(body: ChatRequest | TokenizeRequest) -> list[dict[str, Any]] | None:
    """The tools as the client sent them, without nulls; None if there are none or they are not to be used."""
    if not body.tools or (isinstance(body, ChatRequest) and body.tool_choice == "none"):
        return None
    return [tool.model_dump(exclude_unset=True) for tool in body.tools]


def _template_kwargs(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
    return body.chat_template_kwargs if effort is None else {"reasoning_effort": effort, **body.chat_template_kwargs}


@dataclass
class ServerState:
    """One server. Not ready before `become_ready`, and never again after `drain`."""

    config: EngineConfig
    metrics: ServerMetrics
    client: EngineClient | None = None
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    info: EngineInfo | None = None
    _service: GenerationService | None = None
    _text: TextTools | None = None

    def __post_init__(self) -> None:
        self.model_name = self.config.server.served_model_name or self.config.model.model_path
        self.max_body_nbytes = parse_size(self.config.server.max_body_size, name="max_body_size")
        self.matchmaker = Matchmaker(
            self.config.transfer, is_serving=lambda: self.is_serving, on_missed=self.metrics.note_missed_prefill
        )

    def become_ready(
        self, client: EngineClient, info: EngineInfo, text: TextTools, adapters: ServedAdapters | None = None
    ) -> None:
        """The engine answers: requests are served from now on. adapters: as far as some are loaded."""
        self.client = client
        self.info = info
        self._text = text
        self._service = GenerationService(
            client, info, text.tokenizer, text.token_texts, self.metrics, self.config, self.matchmaker, adapters
        )
        self.metrics.note_ready(info)
        self.matchmaker.become_ready(info)
        client.on_change = self._note_change

    def _note_change(self, info: EngineInfo) -> None:
        """Other weights, or memory released: routers, peers and clients are told from now on."""
        self.info = self.service.info = info
        self.matchmaker.become_ready(info)

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken: those of an engine that is asleep are not."""
        return self._service is not None and self.is_alive and not self._service.info.released

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine that takes requests, or will when it is awake."""
        return self._service is not None and not self.is_draining and self._service.client.is_alive

    @property
    def ready_info(self) -> EngineInfo:
        """What the engine serves. Raises: Unavailable while it loads, drains or is gone."""
        return self.service.info

    @property
    def service(self) -> GenerationService:
        """Raises: Unavailable while the engine loads, drains or is gone."""
        if self._service is None:
            raise Unavailable(f"the model is still loading{self._progress()}; /health tells when it is ready")
        if self.is_draining:
            raise Unavailable("the server is shutting down")
        if not self._service.client.is_alive:
            raise Unavailable("the engine has stopped; the server's log says why")
        return self._service

    @property
    def adapters(self) -> list[AdapterInfo]:
        """What is loaded; nothing while the engine loads."""
        return [] if self._service is None else self._service.adapters.loaded

    @property
    def text(self) -> TextTools:
        """Raises: Unavailable while the engine loads."""
        if self._text is None:
            raise Unavailable("the model is still loading")
        return self._text

    async def render(self, body: ChatRequest | TokenizeRequest) -> RenderedPrompt:
        """The prompt of a conversation; a long one is rendered off the event loop. Raises: RequestError."""
        render = partial(
            self.text.chat_template.render,
            body.messages or [],
            tools=tool_dicts(body),
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=_template_kwargs(body),
        )
        if len(body.messages or []) <= _INLINE_MESSAGES:
            return render()
        return await asyncio.to_thread(render)

    def check_model(self, name: str) -> None:
        """Raises: UnknownModel if `name` is neither the model nor one of its adapters."""
        self.adapter_of(name)

    def adapter_of(self, model: str, lora_path: str = "") -> str:
        """The adapter that a request names by its model ("adapter" or "model:adapter") or by lora_path; "" for none.

        Raises: UnknownModel naming what is served here; RequestError if the two name different ones.
        """
        if model in _ANY_MODEL or model in (self.model_name, self.config.model.model_path):
            return lora_path
        adapters = self.service.adapters
        name = model if model in adapters else model.removeprefix(f"{self.model_name}:")
        if name not in adapters:
            served = ", ".join(repr(each) for each in (self.model_name, *(info.name for info in adapters.loaded)))
            raise UnknownModel(f"model {model!r} is not served here; use {served}", param="model")
        if lora_path not in ("", name):
            raise RequestError(f"model names adapter {name!r}, but lora_path {lora_path!r}", param="lora_path")
        return name

    async def close(self) -> None:
        """Release what the service holds, and close the registry's port."""
        await self.matchmaker.close()
        if self._service is not None:
            self._service.close()

    def _progress(self) -> str:
        progress = self.client.progress if self.client is not None else None
        if progress is None or not progress.total:
            return ""
        return f" ({progress.what}: {100 * progress.done // progress.total}%)"


def request_id_of(request: Request, *names: str) -> str:
    """The client's id for a request: a field of the body, or the X-Request-ID header; empty if there is none."""
    for name in (*names, request.headers.get("x-request-id", "")):
        if name:
            return name[:MAX_REQUEST_ID_LEN]
    return ""


def id_header(request_id: str) -> dict[str, str]:
    """X-Request-ID of a response, if the id can stand in a header."""
    return {"X-Request-ID": request_id} if request_id.isascii() and request_id.isprintable() else {}
