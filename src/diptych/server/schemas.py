"""Bodies of the HTTP requests, as pydantic models: what is read, its type and its default.

Unknown keys are ignored and a null counts as absent, because clients and routers send both. Ranges are checked by
`SamplingParams`, token ids against the vocabulary by `generation`. Nothing here runs once a response streams.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

MAX_N = 128
MAX_STOPS = 64
MAX_NAME_LEN = 512

_TEXT_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _one_or_many(value: object) -> list[str]:
    items: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        raise ValueError("must be a string or a list of strings")
    return items


Strings = Annotated[list[str], BeforeValidator(_one_or_many), WithJsonSchema(_TEXT_OR_LIST)]
StopStrings = Annotated[Strings, Field(max_length=MAX_STOPS)]
TokenIds = Annotated[list[int], Field(max_length=4096)]
StopTokenIds = Annotated[TokenIds, BeforeValidator(_as_list)]
Name = Annotated[str, Field(max_length=MAX_NAME_LEN)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Timeout = Annotated[float, Field(gt=0, le=10**7)]
# Prompts may hold a million ids: they are checked by hand in one pass, and only described here.
Prompt = Annotated[
    Any,
    WithJsonSchema({"anyOf": [*_TEXT_OR_LIST["anyOf"], _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]}),
]
InputIds = Annotated[Any, WithJsonSchema({"anyOf": [_TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]})]
JsonSchema = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]


class Body(BaseModel):
    """Base of all bodies: null is absent, unknown is ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class StreamOptions(Body):
    """OpenAI's `stream_options`, and vLLM's `continuous_usage_stats`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: at most one of these."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    json_: JsonSchema = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchemaFormat(Body):
    """`response_format.json_schema`."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool = False


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(Body):
    """How tokens are chosen; shared by both OpenAI routes. The names are OpenAI's, vLLM's and SGLang's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: StopStrings = []
    stop_token_ids: StopTokenIds = []
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: JsonSchema = None
    regex: str | None = None
    ebnf: str | None = None


def _one_or_list(kind: str) -> dict[str, Any]:
    return {"anyOf": [{"type": kind}, {"type": "array", "items": {"type": kind}}]}


class TransferTicket(Body):
    """vLLM's `kv_transfer_params`, as far as they say where a prompt's KV is, or that another engine wants it."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_host: str | None = None
    remote_port: Annotated[int, Field(ge=1, le=65535)] | None = None


class RendezvousFields(Body):
    """Where a request's sequences meet the engine that computes their prompts; `rendezvous.expand` checks them."""

    bootstrap_host: Annotated[Any, WithJsonSchema(_one_or_list("string"))] = None
    bootstrap_port: Annotated[Any, WithJsonSchema(_one_or_list("integer"))] = None
    bootstrap_room: Annotated[Any, WithJsonSchema(_one_or_list("integer"))] = None
    kv_transfer_params: TransferTicket | None = None


class OpenAIRequest(SamplingFields, RendezvousFields):
    """What both OpenAI routes take beside their prompt."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    user: str | None = None
    priority: Priority = 0
    cache_salt: Name = ""
    extra_key: Name = ""
    rid: Name = ""
    request_id: Name = ""
    timeout: Timeout | None = None
    lora_path: Name = ""
    return_token_ids: bool = False


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class FunctionDefinition(Body):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Body):
    """One entry of `tools`. Unknown keys are kept, for the template."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[Tool] = []
    tool_choice: Annotated[
        Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})
    ] = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None


class NativeSampling(Body):
    """`sampling_params` of /generate, with SGLang's names."""

    max_new_tokens: Annotated[int, Field(ge=0)] = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: StopStrings = []
    stop_token_ids: StopTokenIds = []
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    json_schema: JsonSchema = None
    regex: str | None = None
    ebnf: str | None = None
    stop_regex: Strings = []
    structural_tag: Any = None


_ONE_OR_MANY_SAMPLING: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}


class GenerateRequest(RendezvousFields):
    """POST /generate. Each per-request value may be a list, parallel to a batch of prompts."""

    text: Annotated[Any, WithJsonSchema(_TEXT_OR_LIST)] = None
    input_ids: InputIds = None
    sampling_params: Annotated[Any, WithJsonSchema(_ONE_OR_MANY_SAMPLING)] = {}
    stream: bool = False
    rid: Annotated[Any, WithJsonSchema(_TEXT_OR_LIST)] = None
    return_logprob: Annotated[Any, WithJsonSchema({"type": "boolean"})] = False
    logprob_start_len: Annotated[Any, WithJsonSchema({"type": "integer", "minimum": -1})] = -1
    top_logprobs_num: Annotated[Any, WithJsonSchema({"type": "integer", "minimum": 0})] = 0
    token_ids_logprob: Annotated[Any, WithJsonSchema(_TOKEN_IDS)] = None
    return_text_in_logprobs: bool = False
    priority: Annotated[Any, WithJsonSchema({"type": "integer"})] = 0
    extra_key: Annotated[Any, WithJsonSchema({"type": "string"})] = ""
    lora_path: Annotated[Any, WithJsonSchema(_TEXT_OR_LIST)] = ""
    timeout: Timeout | None = None


class RankRegistration(Body):
    """PUT /route of the registry: one rank of a prefill engine. SGLang's fields, then ours."""

    role: Literal["Prefill", "prefill", "PREFILL"]
    tp_size: Annotated[int, Field(ge=1, le=4096)]
    dp_size: Annotated[int, Field(ge=1, le=4096)]
    rank_ip: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.:_-]+$")]
    rank_port: Annotated[int, Field(ge=1, le=65535)]
    engine_rank: Annotated[int, Field(ge=0, le=4096 * 64)]
    pp_size: Annotated[int, Field(ge=1, le=64)] = 1
    instance_id: Annotated[str, Field(max_length=128)] = ""
    protocol_version: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    fingerprint: Annotated[str, Field(max_length=256)] = ""


class RoleSwitch(Body):
    """POST /pd_role_switch."""

    new_role: Literal["unified", "prefill", "decode", "null"]


class LoadAdapterRequest(Body):
    """POST /load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LEN)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    pinned: bool = False
    load_inplace: bool = False


class UnloadAdapterRequest(Body):
    """POST /unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LEN)]


class AbortRequest(Body):
    """POST /abort_request."""

    rid: Strings = []
    abort_all: bool = False


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a conversation to be rendered first."""

    model: str = ""
    prompt: Annotated[Any, WithJsonSchema(_TEXT_OR_LIST)] = None
    text: Annotated[Any, WithJsonSchema(_TEXT_OR_LIST)] = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str = ""
    tokens: InputIds
    skip_special_tokens: bool = True
