"""Adapters over HTTP, with a fake engine: names, lists, and what is refused before the engine hears of it."""

from __future__ import annotations

import pytest

LOAD = {"lora_name": "sql", "lora_path": "/adapters/sql"}


async def test_loaded_adapters_are_models(world) -> None:
    answer = await world.http.post("/load_lora_adapter", json=LOAD)
    assert answer.json() == {"success": True, "error_message": "", "loaded_adapters": {"sql": "/adapters/sql"}}
    cards = (await world.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in cards[1:]] == [("sql", "/adapters/sql")]
    assert cards[1]["parent"] == cards[0]["id"] and cards[0]["parent"] is None
    assert (await world.http.get("/v1/models/sql")).json() == cards[1]
    assert (await world.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).json()["success"]
    assert (await world.http.get("/v1/models/sql")).status_code == 404


@pytest.mark.parametrize("fields", [{"model": "sql"}, {"lora_path": "sql"}, {"model": "sql", "lora_path": "sql"}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_way_to_name_one(world, path, fields) -> None:
    await world.http.post("/load_lora_adapter", json=LOAD)
    body = {"prompt": "ab", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = await world.http.post(path, json=body | fields)
    assert answer.status_code == 200
    assert [request.adapter for request in world.engine.requests] == ["sql"]
    await world.http.post(path, json=body)
    assert world.engine.requests[1].adapter == ""


async def test_a_batch_names_one_each(world) -> None:
    await world.http.post("/load_lora_adapter", json=LOAD)
    body = {"text": ["a", "b", "c"], "lora_path": ["sql", None, ""], "sampling_params": {"max_new_tokens": 1}}
    assert (await world.http.post("/generate", json=body)).status_code == 200
    asked = {tuple(request.prompt_token_ids): request.adapter for request in world.engine.requests}
    assert asked == {tuple(world.encode(text)): name for text, name in zip("abc", ("sql", "", ""), strict=True)}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_loaded_is_not_found(world, stream) -> None:
    await world.http.post("/load_lora_adapter", json=LOAD)
    for path, body in {
        "/generate": {"text": "a", "lora_path": "other"},
        "/v1/completions": {"prompt": "a", "model": "other"},
    }.items():
        answer = await world.http.post(path, json=body | {"stream": stream})
        assert answer.status_code == 404 and "'sql'" in answer.json()["error"]["message"]
    answer = await world.http.post("/v1/completions", json={"prompt": "a", "model": "sql", "lora_path": "other"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path"
    assert not world.engine.requests


async def test_what_cannot_be_loaded(world) -> None:
    for body, param in (
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        (LOAD | {"load_inplace": True}, "load_inplace"),
        (LOAD | {"lora_name": world.state.model_name}, "lora_name"),
    ):
        answer = await world.http.post("/load_lora_adapter", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert not world.engine.adapters
