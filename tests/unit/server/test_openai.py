"""The two OpenAI routes over HTTP, on a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import httpx
import openai
import pytest


def events_of(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def complete(world, **body):
    return await world.http.post("/v1/completions", json={"prompt": "abc", **body})


async def chat(world, **body):
    return await world.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})


async def test_completion_has_openais_shape(world):
    world.say(" hello")
    response = await complete(world, max_tokens=20)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "text_completion" and body["model"] == "fake" and body["id"].startswith("cmpl-")
    choice = body["choices"][0]
    assert choice["text"] == " hello"
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None and choice["matched_stop"] == 256
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 7  # with EOS
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_completion_defaults_to_16_tokens(world):
    body = (await complete(world)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


async def test_chat_defaults_to_the_rest_of_the_context(world):
    world.say("yes")
    assert (await chat(world)).status_code == 200
    request = world.engine.requests[0]
    assert request.sampling.max_tokens == world.state.info.max_model_len - len(request.prompt_token_ids)


async def test_prompts_come_in_four_shapes(world):
    ids = world.encode("abc")
    for prompt, count in (("abc", 1), (["abc", "abcd"], 2), (ids, 1), ([ids, ids, ids], 3)):
        response = await complete(world, prompt=prompt, max_tokens=3)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(count))
        assert choices[0]["text"] == "abc"


async def test_n_sequences_get_consecutive_seeds(world):
    response = await complete(world, n=3, seed=7, max_tokens=2)
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
    assert sorted(request.sampling.seed for request in world.engine.requests) == [7, 8, 9]
    assert response.json()["usage"]["prompt_tokens"] == 3


async def test_a_seed_is_always_drawn(world):
    await complete(world, max_tokens=1)
    await complete(world, max_tokens=1)
    first, second = (request.sampling.seed for request in world.engine.requests)
    assert first is not None and first != second


async def test_streamed_text_equals_whole_text(world):
    world.say("h\u00e9llo \U0001f600 w\u00f6rld")
    body = {"max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of((await complete(world, **body)).text)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "h\u00e9llo \U0001f600 w\u00f6rld"
    assert all("\ufffd" not in event["choices"][0]["text"] for event in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 19
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_continuous_usage(world):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of((await complete(world, max_tokens=3, stream=True, stream_options=options)).text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 3


async def test_stop_string_ends_text_and_aborts_the_engine(world):
    world.engine.step_s = 0.005
    world.say("one two three four five six seven eight nine ten")
    body = (await complete(world, max_tokens=100, stop=["three", "xx"])).json()
    choice = body["choices"][0]
    assert choice["text"] == "one two "
    assert (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == ("stop", "three", "three")
    assert body["usage"]["completion_tokens"] == len("one two three")
    await world.until(lambda: world.engine.aborted)


async def test_stop_string_can_be_kept(world):
    world.say("one two three four")
    body = (await complete(world, max_tokens=100, stop="three", include_stop_str_in_output=True)).json()
    assert body["choices"][0]["text"] == "one two three"


async def test_stop_token_is_no_text(world):
    world.say("abcdef")
    stop = world.encode("d")[0]
    choice = (await complete(world, max_tokens=100, stop_token_ids=[stop])).json()["choices"][0]
    assert choice["text"] == "abc" and choice["stop_reason"] == stop


async def test_echo_with_logprobs_covers_the_prompt(world):
    world.say("xyz")
    ids = world.encode("abc")
    body = (await complete(world, prompt=[ids], echo=True, logprobs=1, max_tokens=1)).json()
    choice = body["choices"][0]
    assert choice["text"] == "abcx"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "x"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][1] == {"b": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_echo_without_output(world):
    body = (await complete(world, echo=True, logprobs=0, max_tokens=0)).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["usage"]["completion_tokens"] == 0
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 3


async def test_streamed_echo_comes_first(world):
    events = events_of((await complete(world, echo=True, logprobs=0, max_tokens=2, stream=True)).text)
    assert "".join(event["choices"][0]["text"] for event in events) == "abcab"
    tokens = [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]
    assert tokens == ["a", "b", "c", "a", "b"]


async def test_chat_logprobs(world):
    world.say("ok")
    response = await chat(world, logprobs=True, top_logprobs=2)
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "o" and content[0]["bytes"] == [ord("o")] and content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 2


async def test_return_token_ids_and_prompt_logprobs(world):
    body = (await complete(world, max_tokens=2, return_token_ids=True, prompt_logprobs=1)).json()["choices"][0]
    assert body["prompt_token_ids"] == world.encode("abc") and body["token_ids"] == world.encode("ab")
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == 3
    second = world.encode("b")[0]
    assert body["prompt_logprobs"][1][str(second)]["decoded_token"] == "b"


async def test_openai_sdk_streams_a_chat(tcp_world):
    tcp_world.say("Hello there")
    client = openai.AsyncOpenAI(base_url=f"{tcp_world.url}/v1", api_key="none")
    stream = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 12
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], temperature=-1)
    assert error.value.param == "temperature"
    await client.close()


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def test_tool_call_in_text(world):
    world.say('I look. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>')
    choice = (await chat(world, tools=[TOOL])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    call = choice["message"]["tool_calls"][0]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"]) == {"city": "Rome"}


async def test_streamed_tool_call_adds_up(world):
    world.say('<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>')
    events = events_of((await chat(world, tools=[TOOL], stream=True)).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["id"] and calls[0]["function"]["name"] == "get_weather"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Rome"}
    assert not any(delta.get("content") for delta in deltas)
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_named_tool_choice_forces_a_grammar(world):
    world.say('{"city": "Oslo"}')
    choice = {"type": "function", "function": {"name": "get_weather"}}
    message = (await chat(world, tools=[TOOL], tool_choice=choice)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    grammar = world.engine.requests[0].sampling.grammar
    assert grammar.kind == "json_schema" and json.loads(grammar.text)["required"] == ["city"]


async def test_required_tool_choice_streams(world):
    world.say('[{"name": "get_weather", "parameters": {"city": "Oslo"}}]')
    events = events_of((await chat(world, tools=[TOOL], tool_choice="required", stream=True)).text)
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Oslo"}


async def test_reasoning_is_split(make_world):
    async with make_world(reasoning_parser="think") as world:
        world.say("<think>hmm</think>yes")
        message = (await chat(world)).json()["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] == "hmm" and message["content"] == "yes"
        events = events_of((await chat(world, stream=True)).text)
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hmm"
        assert "".join(delta.get("content", "") for delta in deltas) == "yes"


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
            "json_schema",
            '{"type":"array"}',
        ),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ],
)
async def test_structured_output_dialects(world, body, kind, text):
    world.say("x")
    response = await chat(world, **body)
    assert response.status_code == 200, response.text
    grammar = world.engine.requests[0].sampling.grammar
    assert (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**25}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"),
        ({"stop_token_ids": [2**80]}, "stop_token_ids.0"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"logit_bias": {"1": 1e300}}, "logit_bias"),
        ({"logit_bias": {"12345678": 1}}, "logit_bias"),
        ({"priority": 2**40}, "priority"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"logprobs": 1000}, "logprobs"),
        ({"best_of": 4}, "best_of"),
        ({"suffix": "s"}, "suffix"),
        ({"lora_path": 3}, "lora_path"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream_options": {"include_usage": "perhaps"}}, "stream_options.include_usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "ebnf": "b"}, "ebnf"),
        ({"timeout": -1}, "timeout"),
        ({"cache_salt": "x" * 10000}, "cache_salt"),
    ],
)
async def test_bad_values_name_their_field(world, body, param):
    response = await complete(world, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"] and error["code"]
    assert not world.engine.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ],
)
async def test_bad_chat_values_name_their_field(world, body, param):
    response = await chat(world, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_nulls_and_unknown_keys_are_ignored(world):
    body = {
        "temperature": None,
        "stop": None,
        "stream_options": None,
        "bootstrap_room": None,
        "log_metrics": True,
        "n": None,
    }
    assert (await complete(world, **body)).status_code == 200
    assert (await chat(world, tools=None, tool_choice=None, max_tokens=2, nvext={"a": 1})).status_code == 200


@pytest.mark.parametrize("model", ["fake", "default", "unknown", "", None])
async def test_accepted_models(world, model):
    assert (await complete(world, model=model, max_tokens=1)).status_code == 200


async def test_request_id_is_kept_and_returned(world):
    response = await world.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-ID": "abc-1"}
    )
    assert response.headers["x-request-id"] == "abc-1" and response.json()["id"] == "abc-1"
    assert world.engine.requests[0].request_id.startswith("abc-1")


async def test_cache_salt_and_priority_reach_the_engine(world):
    await complete(world, cache_salt="s", priority=5, max_tokens=1)
    await complete(world, extra_key="s", max_tokens=1)
    first, second = world.engine.requests
    assert first.cache_key and second.cache_key and first.cache_key != second.cache_key and first.priority == 5


async def test_timeout_becomes_a_deadline(world):
    await complete(world, timeout=5, max_tokens=1)
    request = world.engine.requests[0]
    assert request.deadline == pytest.approx(request.arrival_time + 5)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("Overloaded", 503), ("PromptTooLong", 400), ("DeadlineExceeded", 504), ("Unavailable", 503), ("Strange", 500)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_engine_have_a_status(world, kind, status, stream):
    world.engine.failure = (kind, "because", "prompt")
    response = await complete(world, stream=stream, n=2)
    assert response.status_code == status
    assert response.json()["error"]["message"] == "because"
    assert ("retry-after" in response.headers) == (status == 503)


async def test_error_in_mid_stream_is_an_event(tcp_world):
    tcp_world.engine.step_s = 0.02
    async with tcp_world.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 500, "stream": True}
    ) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        tcp_world.engine.die("device lost")
        rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("holding", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_aborts_in_every_state(tcp_world, stream, holding, n):
    tcp_world.engine.step_s = 0.01
    tcp_world.engine.is_holding = holding
    task = asyncio.create_task(complete(tcp_world, max_tokens=4000, stream=stream, n=n))
    await tcp_world.until(lambda: len(tcp_world.engine.requests) == n)
    task.cancel()
    await tcp_world.until(lambda: len(tcp_world.engine.aborted) == n)
    assert sorted(tcp_world.engine.aborted) == sorted(request.request_id for request in tcp_world.engine.requests)
    await tcp_world.until(lambda: tcp_world.client.num_open == 0)


async def test_many_streams_at_once(tcp_world):
    async def one(index: int) -> str:
        text = f"number {index} "
        response = await complete(tcp_world, prompt=text, max_tokens=3 * len(text), stream=True)
        return "".join(event["choices"][0]["text"] for event in events_of(response.text))

    results = await asyncio.gather(*(one(index) for index in range(40)))
    assert results == [f"number {index} " * 3 for index in range(40)]
    assert tcp_world.client.num_open == 0


async def test_random_disconnects_leave_nothing_behind(tcp_world):
    chance = random.Random(0)
    tcp_world.engine.step_s = 0.001
    before = len(asyncio.all_tasks())

    async def one(index: int) -> None:
        body = {"max_tokens": chance.randint(1, 300), "stream": chance.random() < 0.5, "n": chance.randint(1, 2)}
        with contextlib.suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(chance.random() * 0.5):
                await complete(tcp_world, prompt=f"number {index}", **body)

    await asyncio.gather(*(one(index) for index in range(200)))
    await tcp_world.until(lambda: tcp_world.client.num_open == 0 and not tcp_world.engine.open)
    await tcp_world.until(lambda: len(asyncio.all_tasks()) <= before)
    assert not tcp_world.client._open and not tcp_world.state.service._ids
    assert (await complete(tcp_world, max_tokens=3)).status_code == 200
