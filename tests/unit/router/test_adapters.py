"""Adapters through the router: at every engine, or at none."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

NAME = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def serve_adapters(engine: Any, *, refuses: str = "") -> list[str]:
    """Have a scripted engine load and unload adapters; returns what it has. refuses: the route that it says no to."""
    loaded: list[str] = []

    async def script(request: Request, body: dict[str, Any]) -> Response:
        if request.url.path == refuses:
            return JSONResponse({"error": {"message": f"no {body['lora_name']} here"}}, 400)
        if request.url.path == "/load_lora_adapter":
            loaded.append(body["lora_name"])
        elif request.url.path == "/unload_lora_adapter":
            loaded.remove(body["lora_name"])
        return JSONResponse({"success": True, "loaded_adapters": dict.fromkeys(loaded, "x"), "from": engine.url})

    engine.script = script
    return loaded


async def test_every_engine_loads_and_is_asked_for_what_it_has(engine_of, route_to) -> None:
    engines = [await engine_of() for _ in range(3)]
    loaded = [serve_adapters(engine) for engine in engines]
    async with route_to(*engines) as router:
        answer = (await router.http.post("/load_lora_adapter", json=NAME)).json()
        assert sorted(answer["engines"]) == sorted(engine.url for engine in engines)
        assert loaded == [["sql"]] * 3
        next(iter(router.state.pool)).models -= {"sql"}
        for field in ("model", "lora_path"):
            for _ in range(6):
                answer = (await router.http.post("/generate", json={"text": "a", field: "sql"})).json()
                assert answer["from"] in (engines[1].url, engines[2].url)
        assert (await router.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
        assert loaded == [[]] * 3


async def test_one_that_refuses_undoes_the_others(engine_of, route_to) -> None:
    engines = [await engine_of() for _ in range(3)]
    loaded = [
        serve_adapters(engine, refuses="/load_lora_adapter" if engine is engines[1] else "") for engine in engines
    ]
    async with route_to(*engines) as router:
        answer = await router.http.post("/load_lora_adapter", json=NAME)
        assert answer.status_code == 400
        assert answer.json()["failed"] == {engines[1].url: "no sql here"}
        assert answer.json()["error"]["message"] == f"no engine has changed: {engines[1].url}: no sql here"
        assert loaded == [[]] * 3


async def test_a_body_that_names_nothing(engine_of, route_to) -> None:
    engine = await engine_of()
    async with route_to(engine) as router:
        for body in (b"{", b"[]", b'{"lora_name": 1}'):
            assert (await router.http.post("/load_lora_adapter", content=body)).status_code == 400
        assert not engine.paths
