"""Routes that ask every engine and answer with all that they say: models, loads, cache flush, aborts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

import diptych
from diptych.errors import RequestError, UnknownModel
from diptych.router.member import Member, State
from diptych.router.relay import no_engine
from diptych.router.state import RouterState
from diptych.router.upstream import EngineFailed, ErrorStatus
from diptych.server.bodies import read_body
from diptych.server.errors import json_response
from diptych.server.streaming import while_connected

ASK_TIMEOUT_S = 2.0
MAX_FLUSH_TIMEOUT_S = 600.0
_NOT_FOUND = 404

Result = TypeVar("Result")


async def ask_all(
    state: RouterState, ask: Callable[[Member], Coroutine[Any, Any, Result]]
) -> list[tuple[Member, Result | EngineFailed | ErrorStatus]]:
    """What each engine that is up answers to `ask`, or why it did not."""

    async def one(member: Member) -> tuple[Member, Result | EngineFailed | ErrorStatus]:
        try:
            return member, await ask(member)
        except (EngineFailed, ErrorStatus) as error:
            return member, error

    asked = [member for member in state.pool if member.state not in (State.JOINING, State.DOWN)]
    return await asyncio.gather(*(one(member) for member in asked))


async def models(state: RouterState, request: Request) -> Response:
    """GET /v1/models: what any engine serves, each name once."""
    return json_response({"object": "list", "data": list((await _models(state, request)).values())})


async def model(state: RouterState, request: Request) -> Response:
    """GET /v1/models/{id}."""
    name = request.path_params["model_id"]
    card = (await _models(state, request)).get(name)
    if card is None:
        raise UnknownModel(f"model {name!r} is served by no engine; GET /v1/models lists those that are", param="model")
    return json_response(card)


async def _models(state: RouterState, request: Request) -> dict[str, Any]:
    def ask(member: Member) -> Coroutine[Any, Any, Any]:
        return state.upstream.ask_json(member.url + "/v1/models", timeout_s=ASK_TIMEOUT_S)

    cards: dict[str, Any] = {}
    answers = [answer for _, answer in await while_connected(request, ask_all(state, ask)) if isinstance(answer, dict)]
    if not answers:
        raise no_engine(state)
    for answer in answers:
        data = answer.get("data")
        for card in data if isinstance(data, list) else []:
            if isinstance(card, dict) and isinstance(card.get("id"), str):
                cards.setdefault(card["id"], card)
    return cards


async def loads(state: RouterState, request: Request) -> Response:
    """GET /v1/loads: every engine's report, at most a health interval old, with its URL, role and state."""
    entries = [
        {"worker": member.url, "role": member.role, "state": member.state, "router_active": member.num_active, **entry}
        for member in state.pool
        for entry in (member.loads or [{}])
    ]
    return json_response({"timestamp": time.time(), "version": diptych.__version__, "loads": entries})


async def get_loads(state: RouterState, request: Request) -> Response:
    """GET /get_loads and /get_load: requests at each engine, as older routers and tools read them."""
    entries = [
        {
            "worker": member.url,
            "role": member.role,
            "load": member.load,
            "dp_rank": index,
            "num_reqs": member.load,
            "num_waiting_reqs": _total(member, "num_waiting_reqs"),
            "num_tokens": _total(member, "num_used_tokens"),
        }
        for index, member in enumerate(state.pool)
    ]
    return json_response({"workers": entries} if request.url.path == "/get_loads" else entries)


def _total(member: Member, name: str) -> float:
    return sum(value for entry in member.loads if isinstance(value := entry.get(name), int | float))


async def flush_cache(state: RouterState, request: Request) -> Response:
    """GET, POST /flush_cache?timeout=: on every engine; 400 if one could not."""
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not 0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise RequestError(f"timeout must be from 0 to {MAX_FLUSH_TIMEOUT_S:g} seconds, got {text!r}", param="timeout")

    def ask(member: Member) -> Coroutine[Any, Any, bytes]:
        url = f"{member.url}/flush_cache?timeout={timeout_s:g}"
        return state.upstream.ask("POST", url, timeout_s=timeout_s + ASK_TIMEOUT_S)

    answers = await while_connected(request, ask_all(state, ask))
    state.pool.forget_prefixes()
    failed = [f"{member.url}: {answer}" for member, answer in answers if isinstance(answer, Exception)]
    if failed:
        return Response("Cache not flushed everywhere:\n" + "\n".join(failed) + "\n", 400, media_type="text/plain")
    return Response(f"Cache flushed on {len(answers)} engines.\n", media_type="text/plain")


async def abort_request(state: RouterState, request: Request) -> Response:
    """POST /abort_request: told to every engine, since any may have it."""
    body = await read_body(request, state.config.max_body_nbytes)

    def ask(member: Member) -> Coroutine[Any, Any, bytes]:
        return state.upstream.ask("POST", member.url + "/abort_request", timeout_s=ASK_TIMEOUT_S, body=body)

    answers = [answer for _, answer in await ask_all(state, ask)]
    for answer in answers:
        if isinstance(answer, ErrorStatus) and 400 <= answer.status < 500 and answer.status != _NOT_FOUND:
            return Response(answer.text, answer.status, media_type="application/json")
    return Response(status_code=200)
