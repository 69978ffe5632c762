"""The openai SDK against the demo model."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

PROMPT = "The capital of France is"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "How is the weather in Rome?"}]


class Verdict(BaseModel):
    """What a structured answer must be."""

    is_fine: bool
    score: int = Field(ge=0, le=9)


VERDICT_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"is_fine": {"type": "boolean"}, "score": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["is_fine", "score"],
            "additionalProperties": False,
        },
    },
}


def complete(client: openai.OpenAI, **fields):
    return client.completions.create(**{"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields})


def chat(client: openai.OpenAI, **fields):
    return client.chat.completions.create(
        **{"model": "demo", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **fields}
    )


def text_of(server, token_ids: list[int]) -> str:
    return server.post("/detokenize", {"tokens": token_ids})["text"]


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completion_says_what_transformers_says(client, server, golden):
    expected = golden["capital"]
    answer = complete(client, max_tokens=12)
    assert answer.choices[0].text == text_of(server, expected["output"][:12])
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected["prompt"]), 12)


@pytest.mark.parametrize("name", ["story-17", "code", "unicode"])
def test_token_ids_in_and_out(server, golden, name):
    expected = golden[name]
    sampling = {"temperature": 0, "max_new_tokens": 16}
    answer = server.post("/generate", {"input_ids": expected["prompt"], "sampling_params": sampling})
    assert answer["output_ids"] == expected["output"][:16]
    assert answer["text"] == text_of(server, expected["output"][:16])


def test_stream_with_usage_joins_to_the_whole(client):
    whole = complete(client)
    *events, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events][-1] == "length"
    assert all(event.usage is None for event in events)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_unicode_stream_never_shows_half_a_character(client, golden, server):
    expected = golden["unicode"]
    events = list(complete(client, prompt=expected["prompt"], max_tokens=16, stream=True))
    pieces = [event.choices[0].text for event in events]
    assert "".join(pieces) == text_of(server, expected["output"][:16])
    assert not any("\ufffd" in piece for piece in pieces)


def test_prompts_of_every_shape(client, golden):
    texts = complete(client, prompt=[PROMPT, "1, 2, 3, 5, 8, 13, 21, 34, 55,"])
    ids = complete(client, prompt=[golden["capital"]["prompt"], golden["digits"]["prompt"]])
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert [choice.text for choice in texts.choices] == [choice.text for choice in ids.choices]
    single = complete(client, prompt=golden["capital"]["prompt"])
    assert single.choices[0].text == texts.choices[0].text


def test_logprobs_of_prompt_and_output(client):
    logprobs = complete(client, echo=True, logprobs=2, max_tokens=3).choices[0].logprobs
    assert "".join(logprobs.tokens).endswith(complete(client, max_tokens=3).choices[0].text)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    # Greedy: what was chosen is the likeliest.
    for chosen, top in zip(logprobs.token_logprobs[-3:], logprobs.top_logprobs[-3:], strict=True):
        assert chosen == pytest.approx(max(top.values()))


def test_chat_logprobs(client):
    content = chat(client, logprobs=True, top_logprobs=3, max_tokens=3).choices[0].logprobs.content
    assert len(content) == 3
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes).decode() == entry.token


def test_two_choices_differ_and_repeat_under_a_seed(client):
    first, again = (complete(client, n=2, temperature=1.0, seed=5, max_tokens=8) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 2
    assert texts == [choice.text for choice in again.choices]


def test_stop_string_across_token_borders(client):
    whole = complete(client, max_tokens=12).choices[0].text
    stop = whole[4:9]  # cut anywhere, within words
    answer = complete(client, max_tokens=12, stop=[stop]).choices[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    streamed = complete(client, max_tokens=12, stop=[stop], stream=True)
    assert "".join(event.choices[0].text for event in streamed) == answer.text


def test_chat_stream(client):
    whole = chat(client).choices[0]
    events = list(chat(client, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content
    assert events[-1].choices[0].finish_reason == whole.finish_reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tool_call(client, choice):
    answer = chat(client, tools=[WEATHER], tool_choice=choice, max_tokens=40, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"place", "days"}
    assert arguments["place"] in ("Paris", "Rome")


def test_streamed_tool_call(client):
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 40, "parallel_tool_calls": False}
    whole = chat(client, **fields).choices[0].message.tool_calls[0].function
    deltas = [event.choices[0].delta for event in chat(client, stream=True, **fields)]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(call.name or "" for call in calls) == whole.name
    assert "".join(call.arguments or "" for call in calls) == whole.arguments


def test_json_schema(client):
    answer = chat(client, response_format=VERDICT_FORMAT, max_tokens=40).choices[0]
    assert answer.finish_reason == "stop"
    assert set(json.loads(answer.message.content)) == {"is_fine", "score"}


def test_parse_into_a_class(client):
    answer = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Verdict, max_tokens=60, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_bad_values_name_their_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, **fields)
    assert error.value.param == param
    assert error.value.type
    assert error.value.code


def test_bad_schema_is_a_bad_request(client):
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        chat(client, response_format={"type": "json_schema", "json_schema": schema})


def test_context_overflow(client):
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, prompt="word " * 2000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, max_tokens=100_000)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "max_tokens")


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as error:
        complete(client, model="another")
    assert error.value.code == "model_not_found"


def test_hostile_bodies_are_bad_requests(server):
    url = f"{server.url}/v1/completions"
    bodies = [
        b'{"model": "demo", "prompt": "\\ud800"}',
        b'{"model": "demo", "prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}",
        b'{"model": "demo", "prompt": ' + b"[" * 100_000,
        b"not json",
        b"\xff\xfe",
        b'{"model": "demo", "prompt": "' + b"x" * 10_000_000 + b'"}',
    ]
    for body in bodies:
        answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=60)
        assert answer.status_code == 400, body[:60]
        assert answer.json()["error"]["message"]


async def test_many_streams_say_what_each_says_alone(server, golden):
    """Sixteen at once: golden prompts from the session's server, each as transformers has it."""
    cases = [golden[name] for name in ("bos", "capital", "story-15", "story-33", "digits", "code", "chat", "json")] * 2
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as client:

        async def say(case: dict[str, list[int]]) -> list[int]:
            stream = await client.completions.create(
                model="demo",
                prompt=case["prompt"],
                max_tokens=8,
                temperature=0,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            return [token for event in [event async for event in stream] for token in event.choices[0].token_ids]

        answers = await asyncio.gather(*map(say, cases))
    assert answers == [case["output"][:8] for case in cases]
