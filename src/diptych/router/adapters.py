"""Routes that load and unload adapters at every engine, or at none: where one fails, the others take it back.

Only engines that are up are asked; one that joins later gets no requests for an adapter that it does not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from diptych.errors import RequestError
from diptych.router.fanout import ASK_TIMEOUT_S, ask_all
from diptych.router.member import Member
from diptych.router.relay import no_engine
from diptych.router.state import RouterState
from diptych.router.upstream import EngineFailed, ErrorStatus
from diptych.server.bodies import read_body
from diptych.server.errors import error_body, json_response

# Reading an adapter takes seconds; unloading waits for the requests that use it.
CHANGE_TIMEOUT_S = 600.0

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"

Answers = Sequence[tuple[Member, bytes | EngineFailed | ErrorStatus]]


async def load_adapter(state: RouterState, request: Request) -> Response:
    """POST /load_lora_adapter {lora_name, lora_path, pinned}: at every engine, or at none."""
    body = await _body(state, request)
    answers = await _tell_all(state, LOAD, body)
    if not _failures(answers):
        for member, _ in answers:
            member.models |= {body["lora_name"]}
        return _done(answers)
    # Whoever broke off may have it by now; whoever refused may have had one of that name before.
    has_it = [member for member, answer in answers if not isinstance(answer, ErrorStatus)]
    left = await _tell(state, has_it, UNLOAD, {"lora_name": body["lora_name"]})
    return _refusal(answers, undone=left)


async def unload_adapter(state: RouterState, request: Request) -> Response:
    """POST /unload_lora_adapter {lora_name}: at every engine, or at none; answered once its requests have ended."""
    body = await _body(state, request)
    name = body["lora_name"]
    cards = await _cards(state, name)
    for member in state.pool:
        member.models -= {name}
    answers = await _tell_all(state, UNLOAD, body)
    if not _failures(answers):
        return _done(answers)
    lost = {member for member, answer in answers if not isinstance(answer, ErrorStatus)} & set(cards)
    left: list[tuple[Member, bytes | EngineFailed | ErrorStatus]] = []
    for member in lost:
        left += await _tell(state, [member], LOAD, {"lora_name": name, "lora_path": cards[member]})
    without = {member for member, answer in left if isinstance(answer, Exception)}
    for member in set(cards) - without:
        member.models |= {name}
    return _refusal(answers, undone=left)


async def _body(state: RouterState, request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await read_body(request, state.config.max_body_nbytes))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("lora_name"), str):
        raise RequestError("lora_name must name the adapter", param="lora_name")
    return body


async def _cards(state: RouterState, name: str) -> dict[Member, str]:
    """The folder of the adapter at each engine that has it."""

    async def ask(member: Member) -> Any:
        return await state.upstream.ask_json(member.url + "/v1/models", timeout_s=ASK_TIMEOUT_S)

    found = {}
    for member, answer in await ask_all(state, ask):
        data = answer.get("data") if isinstance(answer, dict) else None
        for card in data if isinstance(data, list) else []:
            is_adapter = isinstance(card, dict) and card.get("id") == name and card.get("parent")
            if is_adapter and isinstance(card.get("root"), str):
                found[member] = card["root"]
    return found


async def _tell_all(state: RouterState, path: str, body: dict[str, Any]) -> Answers:
    async def ask(member: Member) -> bytes:
        return await _post(state, member, path, body)

    answers = await ask_all(state, ask)
    if not answers:
        raise no_engine(state)
    return answers


async def _tell(state: RouterState, members: Sequence[Member], path: str, body: dict[str, Any]) -> Answers:
    answers = await asyncio.gather(*(_post(state, member, path, body) for member in members), return_exceptions=True)
    return [
        (member, answer)
        for member, answer in zip(members, answers, strict=True)
        if isinstance(answer, bytes | EngineFailed | ErrorStatus)
    ]


async def _post(state: RouterState, member: Member, path: str, body: dict[str, Any]) -> bytes:
    return await state.upstream.ask("POST", member.url + path, timeout_s=CHANGE_TIMEOUT_S, body=orjson.dumps(body))


def _failures(answers: Answers) -> dict[str, str]:
    return {member.url: _reason(answer) for member, answer in answers if isinstance(answer, Exception)}


def _reason(error: Exception) -> str:
    """What an engine says is wrong, without the JSON around it."""
    if isinstance(error, ErrorStatus):
        try:
            return str(orjson.loads(error.text)["error"]["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            pass
    return str(error)


def _done(answers: Answers) -> Response:
    first = next(answer for _, answer in answers if isinstance(answer, bytes))
    return json_response({**orjson.loads(first), "engines": [member.url for member, _ in answers]})


def _refusal(answers: Answers, *, undone: Answers) -> Response:
    """One answer that names who failed, and who could not take it back."""
    failures, stuck = _failures(answers), _failures(undone)
    message = "no engine has changed: " + "; ".join(f"{url}: {reason}" for url, reason in failures.items())
    if stuck:
        message += "; but this could not be taken back at " + "; ".join(f"{url}: {why}" for url, why in stuck.items())
    statuses = [answer.status for _, answer in answers if isinstance(answer, ErrorStatus)]
    status = statuses[0] if statuses else 502
    body = {"success": False, "error_message": message, "failed": failures}
    return json_response(body | error_body(status, message, "lora_name", "adapter_refused"), status)
