"""The way of one request: to an engine or a pair, to others if that fails before its first byte, and its answer's back.

The answer's bytes pass as they are. Once the first has left, an engine's death ends the answer with an error event, or
breaks it off where there are no events; it is never silence. When the client goes, the connection to the engine goes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.errors import DiptychError, Unavailable
from diptych.router.config import pause_s
from diptych.router.events import is_last, split_events
from diptych.router.exchange import Exchange
from diptych.router.headers import Identity, forwarded, returned
from diptych.router.member import Member
from diptych.router.pool import Pair
from diptych.router.prompt import Prompt
from diptych.router.state import RouterState
from diptych.router.upstream import Answer, EngineFailed
from diptych.server.errors import error_body, json_response, response_of
from diptych.server.streaming import DONE, ClientGone, event, while_connected

logger = logging.getLogger(__name__)

# An answer up to this size is read whole before any of it is sent, so that it can still be had elsewhere.
MAX_WHOLE_NBYTES = 8 << 20
_RETRIED = (500, 502, 503)
_BAD_GATEWAY = 502
_OVERLOAD = 503


@dataclass(frozen=True, kw_only=True)
class Call:
    """A client's request. path: with its query. headers: names in lower case. is_paired: prefill may be elsewhere."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    identity: Identity
    prompt: Prompt
    is_paired: bool
    arrived_at: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An attempt of which the client has seen nothing. response: what it gets if there is no other attempt."""

    reason: str
    blamed: Member
    response: Response

    @property
    def may_repeat(self) -> bool:
        """Whether the same engine may be asked again if there is no other: it did not say no."""
        return self.reason in ("unreachable", "broken")


class Relay(Response):
    """The answer to `call`, from whichever engine gives it."""

    def __init__(self, state: RouterState, call: Call) -> None:
        super().__init__()
        self._state = state
        self._call = call
        self._status = 499  # never sent: what the log says if the client went before there was an answer
        self._has_started = False
        self._is_events = False
        self._last_sent = b""
        self._num_attempts = 0
        self._route = "none"
        self._outcome = "no_engine"
        self._first_byte_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.num_open += 1
        self._scope, self._receive, self._send = scope, receive, send
        try:
            await while_connected(Request(scope, receive), self._run())
        except ClientGone:
            pass
        finally:
            self._state.num_open -= 1
            self._log()

    async def _run(self) -> None:
        failure: Failure | None = None
        excluded: set[Member] = set()
        for attempt in range(1, self._state.config.max_attempts + 1):
            pair = await self._choose(failure, excluded, attempt)
            if pair is None:
                break
            failure = await self._attempt(pair)
            if failure is None:
                return
            excluded.add(failure.blamed)
        await self._give_up(failure)

    async def _choose(self, failure: Failure | None, excluded: set[Member], attempt: int) -> Pair | None:
        pool, prompt = self._state.pool, self._call.prompt
        pair = pool.choose(prompt, excluded)
        if pair is None and failure is not None and failure.may_repeat:
            await asyncio.sleep(pause_s(attempt - 1))
            pair = pool.choose(prompt)
        if pair is None:
            return None
        if failure is not None:
            self._state.metrics.note_retry(failure.reason)
        overhead_s = None if failure is not None else _now() - self._call.arrived_at
        if not self._call.is_paired:
            pair = pair._replace(prefill=None)
        self._state.metrics.note_choice(is_remote=pair.prefill is not None, overhead_s=overhead_s)
        return pair

    async def _attempt(self, pair: Pair) -> Failure | None:
        """Returns None once the client has its answer, complete or not."""
        target, prefill = pair.target, pair.prefill
        call, self._outcome = self._call, "client_gone"
        self._num_attempts += 1
        self._route = target.url if prefill is None else f"{target.url} prefill {prefill.url}"
        body = call.prompt.body
        if prefill is not None:
            body = call.prompt.with_bootstrap(prefill.address.bootstrap_host, prefill.bootstrap_port)
        headers = forwarded(call.headers, call.identity, self._state.config.engine_api_key)
        upstream = self._state.upstream.request(call.method, target.url + call.path, headers=headers, body=body or None)
        with self._state.pool.exchange(pair, call.prompt.num_tokens) as exchange:
            try:
                async with asyncio.timeout(None) as exchange.scope, upstream as answer:
                    if answer.status in _RETRIED:
                        failure = await self._refusal(answer, exchange)
                        self._outcome = failure.reason
                        return failure
                    await self._pass_on(answer, exchange)
                    target.note_request_done()
                    self._outcome = "ok" if answer.status < 400 else "client_error" if answer.status < 500 else "failed"
                    return None
            except EngineFailed as error:
                self._outcome = "broken" if error.was_connected else "unreachable"
                target.note_disconnected(str(error), _now())
                self._state.watch.hurry(target)
                return await self._broken(exchange, str(error))
            except TimeoutError:
                self._outcome = "broken"
                return await self._broken(exchange, exchange.broken_by)
            finally:
                self._state.metrics.note_attempt(target.url, self._outcome)

    async def _refusal(self, answer: Answer, exchange: Exchange) -> Failure:
        """What an engine says that cannot or will not take the request. Raises: EngineFailed."""
        text = await answer.read_up_to(MAX_WHOLE_NBYTES)
        response = Response(text, answer.status)
        response.raw_headers = returned(answer.headers, self._call.identity)
        target, blamed = exchange.target, exchange.target
        if answer.status == _OVERLOAD:
            target.note_request_done()
            self._state.watch.hurry(target)  # it may be draining
            if not answer.header(b"retry-after"):
                response.raw_headers.append((b"retry-after", b"1"))
            return Failure(reason="refused", blamed=target, response=response)
        if answer.status == _BAD_GATEWAY and exchange.prefill is not None:
            blamed = exchange.prefill
        blamed.note_request_failed(f"HTTP {answer.status}", _now())
        return Failure(reason="failed", blamed=blamed, response=response)

    async def _pass_on(self, answer: Answer, exchange: Exchange) -> None:
        """The answer from its headers to its end. Raises: EngineFailed if it breaks off."""
        self._status = answer.status
        length = answer.header(b"content-length")
        if answer.header(b"content-type").startswith(b"text/event-stream"):
            self._is_events = True
            await self._pass_on_events(answer, exchange)
        elif length.isdigit() and int(length) <= MAX_WHOLE_NBYTES:
            body = await answer.read_up_to(MAX_WHOLE_NBYTES + 1)
            await self._start(answer, exchange)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            while chunk := await answer.read():
                exchange.last_byte_at = _now()
                await self._send_some(chunk, answer, exchange)
            await self._end(answer, exchange)

    async def _pass_on_events(self, answer: Answer, exchange: Exchange) -> None:
        held = b""
        clock = asyncio.get_running_loop().time
        while chunk := await answer.read():
            exchange.last_byte_at = clock()
            whole, held = split_events(held, chunk)
            if whole:
                self._last_sent = whole
                await self._send_some(whole, answer, exchange)
        if held:
            await self._send_some(held, answer, exchange)
        await self._end(answer, exchange)

    async def _send_some(self, chunk: bytes, answer: Answer, exchange: Exchange) -> None:
        if not self._has_started:
            await self._start(answer, exchange)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _start(self, answer: Answer, exchange: Exchange) -> None:
        """From here on there is no other attempt."""
        self._has_started = True
        exchange.first_byte()
        self._first_byte_at = _now()
        seconds = self._first_byte_at - self._call.arrived_at
        self._state.metrics.note_first_byte(seconds)
        if self._is_events and answer.status == 200 and self._num_attempts == 1:
            self._state.pool.note_first_event(exchange, seconds)
        headers = returned(answer.headers, self._call.identity)
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _end(self, answer: Answer, exchange: Exchange) -> None:
        if not self._has_started:
            await self._start(answer, exchange)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _broken(self, exchange: Exchange, cause: str) -> Failure | None:
        """The engine has gone: a Failure if the client has seen nothing yet, else the clearest end that is possible."""
        exchange.scope = None
        when = "after the answer began" if self._has_started else "before any answer"
        extra = {"request_id": self._call.identity.request_id}
        logger.warning("lost engine %s %s: %s", exchange.target.url, when, cause, extra=extra)
        if not self._has_started:
            return Failure(reason=self._outcome, blamed=exchange.target, response=_lost_response(self._outcome))
        if self._is_events:
            end = b"" if is_last(self._last_sent) else event(_lost_body()) + DONE
            await self._send({"type": "http.response.body", "body": end, "more_body": False})
        # Else the body stays short of its announced end, and the server closes the connection on it.
        return None

    async def _give_up(self, failure: Failure | None) -> None:
        if failure is None:
            self._state.metrics.note_refused("no_engine")
            response = response_of(no_engine(self._state))
        else:
            response = failure.response
        self._status = response.status_code
        if b"x-request-id" not in dict(response.raw_headers):
            response.headers["X-Request-ID"] = self._call.identity.request_id
        await response(self._scope, self._receive, self._send)

    def _log(self) -> None:
        if not self._state.config.log_requests:
            return
        first_s = self._first_byte_at - self._call.arrived_at if self._first_byte_at else float("nan")
        logger.info(
            "%s %s %d %s: engine %s, attempts %d, prompt ~%d tokens, first byte %.1f ms, all %.1f ms, trace_id=%s",
            self._call.method,
            self._call.path,
            self._status,
            self._outcome,
            self._route,
            self._num_attempts,
            self._call.prompt.num_tokens,
            1e3 * first_s,
            1e3 * (_now() - self._call.arrived_at),
            self._call.identity.trace_id,
            extra={"request_id": self._call.identity.request_id},
        )


def no_engine(state: RouterState) -> DiptychError:
    """Why nobody takes a request now."""
    members = [f"{member.role} {member.state}" for member in state.pool]
    known = ", ".join(sorted(set(members))) or "none is known"
    return Unavailable(f"no engine can take a request now ({known}); GET /workers says why")


def _lost_body() -> dict[str, object]:
    return error_body(_BAD_GATEWAY, "the engine that answered this request is gone; send it again", code="engine_lost")


def _lost_response(reason: str) -> Response:
    if reason == "unreachable":
        return response_of(Unavailable("no engine could be reached; try again in a moment"))
    return json_response(_lost_body(), _BAD_GATEWAY)


def _now() -> float:
    return asyncio.get_running_loop().time()
