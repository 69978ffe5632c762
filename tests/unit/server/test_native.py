"""SGLang's /generate over HTTP, on a fake engine."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest


async def generate(world, **body):
    return await world.http.post("/generate", json=body)


async def test_single_text(world):
    world.say("hello")
    response = await generate(world, text="abc", sampling_params={"max_new_tokens": 10, "temperature": 0}, rid="r1")
    body = response.json()
    assert body["text"] == "hello" and body["output_ids"] == [*world.encode("hello"), 256]
    meta = body["meta_info"]
    assert meta["id"] == "r1" and meta["finish_reason"] == {"type": "stop", "matched": 256}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 6, 3)
    assert meta["e2e_latency"] > 0
    assert response.headers["x-request-id"] == "r1"


async def test_put_and_token_ids(world):
    response = await world.http.put("/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}})
    assert response.json()["output_ids"] == [1, 2, 1]
    assert response.json()["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_default_is_128_tokens(world):
    assert (await generate(world, text="a")).json()["meta_info"]["completion_tokens"] == 128


async def test_batch_with_parallel_lists(world):
    body = (
        await generate(
            world,
            text=["ab", "cd"],
            sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 3}],
            rid=["x", "y"],
            return_logprob=[False, True],
        )
    ).json()
    assert [item["text"] for item in body] == ["ab", "cdc"]
    assert [item["meta_info"]["id"] for item in body] == ["x", "y"]
    assert "output_token_logprobs" not in body[0]["meta_info"] and "output_token_logprobs" in body[1]["meta_info"]


async def test_batch_of_one_is_a_list(world):
    body = (await generate(world, input_ids=[[1, 2]], sampling_params={"max_new_tokens": 1})).json()
    assert isinstance(body, list) and len(body) == 1


async def test_n_gives_a_list(world):
    body = (await generate(world, text="ab", sampling_params={"max_new_tokens": 1, "n": 3})).json()
    assert [item["text"] for item in body] == ["a", "a", "a"]
    assert len({request.sampling.seed for request in world.engine.requests}) == 3


async def test_stream_repeats_the_whole_text(world):
    response = await generate(world, text="abc", sampling_params={"max_new_tokens": 6}, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line[6:])["text"] for line in lines[:-1]]
    assert texts[-1] == "abcabc"
    assert all(after.startswith(before) for before, after in pairwise(texts))


async def test_streamed_batch_has_indices(world):
    response = await generate(world, text=["ab", "cd"], sampling_params={"max_new_tokens": 2}, stream=True)
    last = {}
    for line in response.text.split("\n\n")[:-2]:
        item = json.loads(line[6:])
        last[item["index"]] = item["text"]
    assert last == {0: "ab", 1: "cd"}


async def test_logprobs(world):
    response = await generate(
        world,
        text="abc",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[5],
        return_text_in_logprobs=True,
    )
    meta = response.json()["meta_info"]
    a, b, c = world.encode("abc")
    assert meta["input_token_logprobs"] == [[None, a, "a"], [-0.5, b, "b"], [-0.5, c, "c"]]
    assert meta["output_token_logprobs"] == [[-0.5, a, "a"], [-0.5, b, "b"]]
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"][1]) == 2
    assert meta["output_top_logprobs"][0][0] == [-0.5, a, "a"]
    assert meta["output_token_ids_logprobs"][0][0][:2] == [-7.0, 5]


async def test_logprobs_begin_where_asked(world):
    meta = (
        await generate(
            world, text="abc", sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=2
        )
    ).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, world.encode("c")[0], None]]
    meta = (await generate(world, text="abc", sampling_params={"max_new_tokens": 1}, return_logprob=True)).json()[
        "meta_info"
    ]
    assert meta["input_token_logprobs"] == [] and "input_top_logprobs" not in meta


async def test_scoring_without_output(world):
    body = (
        await generate(
            world, text="abc", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
        )
    ).json()
    assert body["text"] == "" and body["output_ids"] == [] and len(body["meta_info"]["input_token_logprobs"]) == 3


async def test_what_the_router_adds_is_ignored(world):
    extra = {
        "model": None, "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False,
        "return_entropy": False, "return_hidden_states": False, "bootstrap_host": None, "bootstrap_port": None,
        "bootstrap_room": None, "kv_transfer_params": None, "image_data": None, "lora_path": None,
        "session_params": None,
    }  # fmt: skip
    assert (await generate(world, text="a", sampling_params={"max_new_tokens": 1}, **extra)).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 3}, "text"),
        ({"text": []}, "text"),
        ({"text": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [2**65]}, "input_ids"),
        ({"input_ids": [1000]}, "input_ids"),
        ({"text": "a", "sampling_params": 3}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"sampling_seed": 2**90}}, "sampling_params.sampling_seed"),
        ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"json_schema": "{}", "regex": "a"}}, "regex"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": 3}, "rid"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1e30}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 50}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": ["x"]}, "token_ids_logprob"),
        ({"text": "a", "priority": 2**50}, "priority"),
        ({"text": "a", "lora_path": 3}, "lora_path"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_values_name_their_field(world, body, param, stream):
    response = await generate(world, stream=stream, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not world.engine.requests
