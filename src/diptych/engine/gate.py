"""Whether new requests reach the scheduler: they do, they are held until it is ready for them, or they are refused.

Several may hold the gate at a time; it opens when the last lets go. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.core.batch import FinishReason
from diptych.core.messages import RequestFailed, RequestOutput
from diptych.core.request import Request
from diptych.errors import DiptychError, Overloaded, RequestError, Unavailable


class Gate:
    """Passes requests to `add`, which raises what refuses one.

    Args: max_held: as many as the scheduler would queue; more could not all pass once the gate opens.
    """

    def __init__(self, add: Callable[[Request], None], *, max_held: int) -> None:
        self._add = add
        self._max_held = max_held
        self._holders: set[str] = set()
        self._held: dict[str, Request] = {}
        self._refusal: str | None = None
        self._answers: list[RequestFailed | RequestOutput] = []

    @property
    def reason(self) -> str | None:
        """Why nothing passes now; None where it does."""
        return self._refusal or next(iter(sorted(self._holders)), None)

    @property
    def held(self) -> list[str]:
        """Ids of the requests that wait here."""
        return list(self._held)

    def offer(self, request: Request) -> None:
        """Pass a request on, or keep it. Raises what refuses it."""
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        if self._holders:
            if request.request_id in self._held:
                raise RequestError(f"request_id {request.request_id!r} is already in use", param="request_id")
            if len(self._held) >= self._max_held:
                raise Overloaded(f"{len(self._held)} requests are held already; try again later")
            self._held[request.request_id] = request
        else:
            self._add(request)

    def abort(self, request_ids: list[str] | None) -> None:
        """End held requests (None: all)."""
        for request_id in list(self._held) if request_ids is None else request_ids:
            if self._held.pop(request_id, None) is not None:
                self._answers.append(RequestOutput(request_id, [], FinishReason.ABORT))

    def hold(self, reason: str) -> None:
        """Keep what comes until `let_go` with the same reason."""
        self._holders.add(reason)

    def let_go(self, reason: str) -> None:
        """Pass on what was kept, in order, unless somebody else holds it."""
        self._holders.discard(reason)
        if self._holders or self._refusal is not None:
            return
        held, self._held = self._held, {}
        for request in held.values():
            try:
                self._add(request)
            except DiptychError as error:
                self._answers.append(RequestFailed.of(request.request_id, error))

    def refuse(self, reason: str) -> None:
        """Refuse what comes, and what was kept, until `welcome`."""
        self._refusal = reason
        held, self._held = self._held, {}
        self._answers += [RequestFailed.of(request_id, Unavailable(reason)) for request_id in held]

    def welcome(self) -> None:
        """Refuse no longer."""
        self._refusal = None

    def take_answers(self) -> list[RequestFailed | RequestOutput]:
        """What to tell clients since the last call."""
        answers, self._answers = self._answers, []
        return answers
