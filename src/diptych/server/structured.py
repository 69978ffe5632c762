"""Which grammar a request asks for, in any of the dialects of OpenAI, vLLM and SGLang.

Makes a `Grammar`; whether it compiles is for the engine to say.
"""

from __future__ import annotations

import orjson

from diptych.core.request import Grammar, GrammarKind
from diptych.errors import RequestError, Unsupported
from diptych.server.schemas import NativeSampling, SamplingFields

_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


def _json_grammar(schema: object, param: str) -> Grammar:
    """Of a schema given as an object or as JSON text."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} must be a JSON schema: an object, or text that holds one", param=param)
    return Grammar(GrammarKind.JSON_SCHEMA, _dumps(schema, param).decode())


def _dumps(schema: object, param: str) -> bytes:
    try:
        return orjson.dumps(schema)
    except orjson.JSONEncodeError as error:
        raise RequestError(f"{param} cannot be read as a JSON schema: {error}", param=param) from None


def _choice_grammar(choices: list[str], param: str) -> Grammar:
    if not choices:
        raise RequestError(f"{param} must name at least one choice", param=param)
    return Grammar(GrammarKind.CHOICE, orjson.dumps(choices).decode())


def _collect(
    *,
    json: dict[str, object],
    regex: dict[str, str | None],
    ebnf: dict[str, str | None],
    choice: dict[str, list[str] | None],
) -> dict[str, Grammar]:
    """Grammars by the name of the field that asked for each; keys whose value is None are skipped."""
    found = {name: _json_grammar(schema, name) for name, schema in json.items() if schema is not None}
    found |= {name: Grammar(GrammarKind.REGEX, text) for name, text in regex.items() if text is not None}
    found |= {name: Grammar(GrammarKind.EBNF, text) for name, text in ebnf.items() if text is not None}
    found |= {name: _choice_grammar(texts, name) for name, texts in choice.items() if texts is not None}
    return found


def _only(found: dict[str, Grammar]) -> Grammar | None:
    if len(found) > 1:
        names = " and ".join(found)
        raise RequestError(f"{names} cannot be combined: give one structured-output constraint", param=list(found)[-1])
    return next(iter(found.values()), None)


def openai_grammar(body: SamplingFields) -> Grammar | None:
    """The constraint of an OpenAI-style body. Raises: RequestError if it asks for two."""
    outputs = body.structured_outputs
    found = _collect(
        json={
            "guided_json": body.guided_json,
            "json_schema": body.json_schema,
            "structured_outputs.json": outputs.json_ if outputs else None,
        },
        regex={
            "guided_regex": body.guided_regex,
            "regex": body.regex,
            "structured_outputs.regex": outputs.regex if outputs else None,
        },
        ebnf={
            "guided_grammar": body.guided_grammar,
            "ebnf": body.ebnf,
            "structured_outputs.grammar": outputs.grammar if outputs else None,
        },
        choice={
            "guided_choice": body.guided_choice,
            "structured_outputs.choice": outputs.choice if outputs else None,
        },
    )
    if outputs is not None and outputs.json_object:
        found["structured_outputs.json_object"] = _ANY_OBJECT
    response_format = body.response_format
    if response_format is not None and response_format.type == "json_object":
        found["response_format"] = _ANY_OBJECT
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise RequestError("response_format.json_schema is missing", param="response_format.json_schema")
        found["response_format"] = _json_grammar(
            response_format.json_schema.schema_, "response_format.json_schema.schema"
        )
    return _only(found)


def native_grammar(sampling: NativeSampling) -> Grammar | None:
    """The constraint of SGLang-style sampling parameters. Raises: RequestError if it asks for two."""
    if sampling.structural_tag is not None:
        raise Unsupported("structural_tag is not supported; use json_schema, regex or ebnf", param="structural_tag")
    if sampling.stop_regex:
        raise Unsupported("stop_regex is not supported; use stop", param="stop_regex")
    return _only(
        _collect(
            json={"json_schema": sampling.json_schema},
            regex={"regex": sampling.regex},
            ebnf={"ebnf": sampling.ebnf},
            choice={},
        )
    )
