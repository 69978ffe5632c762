"""The server's (or a Python program's) end of the channel to one engine, on an asyncio loop.

Owns which requests are open, and the outputs that nobody has read yet. Knows nothing of HTTP or text. Everything runs
on one event loop. The socket is a plain DEALER watched by the loop, so that a send never has to be awaited: an abort
leaves even from the finally-block of a generator that is being torn down.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec
import zmq

from diptych import errors
from diptych.core.calls import WorkerCall
from diptych.core.channel import Channel
from diptych.core.messages import (
    AbortRequests,
    AddRequest,
    CallWorkers,
    Changed,
    Drain,
    EngineInfo,
    EngineLoad,
    Fatal,
    FlushCache,
    FromEngine,
    GetLoad,
    Loading,
    Ready,
    Reply,
    RequestFailed,
    RequestOutput,
    RequestOutputs,
    Stopped,
    ToEngine,
)
from diptych.core.request import Request

logger = logging.getLogger(__name__)


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one; what a reader gets that fell behind."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return RequestOutput(
        last.request_id,
        [token_id for output in outputs for token_id in output.token_ids],
        last.finish_reason,
        last.matched_stop,
        max(output.cached_tokens for output in outputs),
        [entry for output in outputs for entry in output.logprobs],
        [entry for output in outputs for entry in output.prompt_logprobs],
        next((output.queue_s for output in outputs if output.queue_s is not None), None),
        last.speculation,
        last.weight_version,
    )


class _OpenRequest:
    """Outputs of one request that nobody has read yet. `is_over`: the engine will say nothing more about it."""

    __slots__ = ("error", "is_over", "outputs", "waiter")

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.error: errors.DiptychError | None = None
        self.is_over = False
        self.waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.is_over = True
        self._wake()

    def fail(self, error: errors.DiptychError) -> None:
        if not self.is_over:
            self.error, self.is_over = error, True
            self._wake()

    async def read(self) -> RequestOutput:
        """All that has arrived, as one output. Raises: the request's error, after its last output."""
        while not self.outputs:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        outputs, self.outputs = self.outputs, []
        return merge_outputs(outputs)

    def _wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class EngineClient:
    """Talks to one engine.

    Args: socket: a DEALER, bound or connected; the client closes it. on_load, on_progress: called with every load
    report and every step of loading. Call `start` on the event loop before anything else. info: what the engine serves;
    on_change: called with it whenever it changes.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        *,
        on_load: Callable[[EngineLoad], None] | None = None,
        on_progress: Callable[[Loading], None] | None = None,
    ) -> None:
        socket.setsockopt(zmq.SNDTIMEO, 0)  # a bound DEALER whose peer is gone would block for ever
        self._channel: Channel[ToEngine, FromEngine] = Channel(socket, FromEngine)
        self._socket = socket
        self._on_load = on_load
        self._on_progress = on_progress
        self._open: dict[str, _OpenRequest] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count(1)
        self._failure: errors.DiptychError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._is_closed = False
        self._stopped = asyncio.Event()
        self.progress: Loading | None = None
        self.last_load: EngineLoad | None = None
        self.info: EngineInfo | None = None
        self.on_change: Callable[[EngineInfo], None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the engine has neither failed nor stopped."""
        return self._failure is None

    @property
    def num_open(self) -> int:
        """Requests without a final answer."""
        return sum(not request.is_over for request in self._open.values())

    async def start(self) -> EngineInfo:
        """Listen, and wait until the engine is ready. Raises: what stopped it instead."""
        self._loop = asyncio.get_running_loop()
        if self._ready is None:
            self._ready = self._loop.create_future()
            self._loop.add_reader(self._socket.fileno(), self._receive)
            self._receive()
        return await asyncio.shield(self._ready)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until its finish reason is set; closing the iterator early aborts the request.

        Raises: the class of `diptych.errors` that the engine names; Unavailable if it stops meanwhile.
        """
        if request.request_id in self._open:
            raise errors.RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        state = self._open[request.request_id] = _OpenRequest()
        try:
            self._send(AddRequest(request))
            while True:
                output = await state.read()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._open[request.request_id]
            if not state.is_over:
                self.abort([request.request_id])

    def abort(self, request_ids: list[str] | None) -> None:
        """Stop these requests (None: all); each ends with finish reason `abort`. Does nothing if the engine is gone."""
        with suppress(errors.DiptychError):
            self._send(AbortRequests(request_ids))

    async def load(self, timeout_s: float = 5.0) -> EngineLoad:
        """The engine's load now. Raises: Unavailable without an answer in time."""
        reply = await self.call(GetLoad, timeout_s)
        if reply.load is None:
            raise errors.InvariantError("the engine answered a load query without a load")
        return reply.load

    async def flush_cache(self, timeout_s: float = 5.0) -> Reply:
        """Empty the prefix cache; `ok` is False while requests run. Raises: Unavailable without an answer in time."""
        return await self.call(FlushCache, timeout_s)

    async def call_workers(self, call: WorkerCall, timeout_s: float | None) -> bytes:
        """Have the workers obey; msgpack, of the form that the call says. Raises: what they say, or Unavailable."""
        return (await self.call(lambda call_id: CallWorkers(call_id, call), timeout_s)).value

    def tell_workers(self, call: WorkerCall) -> None:
        """Have the workers obey; nobody waits for their answer. Raises: Unavailable if the engine is gone."""
        self._send(CallWorkers(next(self._call_ids), call))

    async def drain(self, timeout_s: float) -> None:
        """Have the engine finish within `timeout_s`, abort what still runs then, and stop; returns when it has."""
        with suppress(errors.DiptychError):
            self._send(Drain(timeout_s))
            await self._stopped.wait()

    def receive_last(self) -> None:
        """Take what a dead engine has left in the socket, such as the reason of its death."""
        self._receive()

    def fail(self, error: errors.DiptychError) -> None:
        """The engine is gone: open requests and calls end with `error`, and later ones. The first cause is kept."""
        if self._failure is not None:
            return
        self._failure = error
        for request in self._open.values():
            request.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may be waiting for it
        self._stopped.set()

    def close(self) -> None:
        """Stop listening and close the socket; open requests fail with Unavailable."""
        if self._is_closed:
            return
        self._is_closed = True
        self.fail(errors.Unavailable("the server is shutting down"))
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)

    async def call(self, message_of: Callable[[int], ToEngine], timeout_s: float | None) -> Reply:
        """Send the message that `message_of` makes for a call id, and wait for its Reply.

        Raises: the error that the reply names; Unavailable without an answer in time (None: however long it takes).
        """
        call_id = next(self._call_ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(message_of(call_id))
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise errors.Unavailable(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            del self._calls[call_id]
        if reply.error_kind is not None:
            raise errors.error_of_kind(reply.error_kind, reply.message)
        return reply

    def _send(self, message: ToEngine) -> None:
        if self._failure is not None:
            raise errors.Unavailable(str(self._failure))
        if self._loop is None:
            raise errors.Unavailable("the engine has not been started")
        try:
            self._channel.send(message)
        except zmq.Again:
            raise errors.Unavailable("the engine is not connected") from None
        # The socket's descriptor is edge-triggered and a send may have consumed the edge of an arrival.
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        if self._is_closed:
            return
        for message in self._channel.receive_all():
            self._dispatch(message)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case RequestOutputs(outputs, load):
                for output in outputs:
                    request = self._open.get(output.request_id)
                    if request is not None:
                        request.put(self._with_version(output))
                if load is not None:
                    self._note_load(load)
            case RequestFailed(request_id, kind, text, param):
                request = self._open.get(request_id)
                if request is not None:
                    request.fail(errors.error_of_kind(kind, text, param))
            case Reply(call_id):
                call = self._calls.get(call_id)
                if message.load is not None:
                    self._note_load(message.load)
                if call is not None and not call.done():
                    call.set_result(message)
            case _:
                self._follow_life(message)

    def _with_version(self, output: RequestOutput) -> RequestOutput:
        """What ends a request says which weights it ended under; their name changes between two messages."""
        if output.finish_reason is None or self.info is None:
            return output
        return msgspec.structs.replace(output, weight_version=self.info.weight_version)

    def _follow_life(self, message: FromEngine) -> None:
        match message:
            case Loading():
                self.progress = message
                if self._on_progress is not None:
                    self._on_progress(message)
            case Changed(info):
                self._note_info(info)
            case Ready(info):
                self._note_info(info)
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case Fatal(text, kind):
                logger.error("the engine stopped: %s", text)
                starting = self._ready is not None and not self._ready.done()
                error = errors.Unavailable(f"the engine stopped: {text}")
                self.fail(errors.error_of_kind(kind, text) if starting else error)
            case Stopped():
                self.fail(errors.Unavailable("the engine has stopped"))

    def _note_info(self, info: EngineInfo) -> None:
        self.info = info
        if self.on_change is not None:
            self.on_change(info)

    def _note_load(self, load: EngineLoad) -> None:
        self.last_load = load
        if self._on_load is not None:
            self._on_load(load)
