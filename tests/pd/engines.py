"""Engines of their own processes, joined by real ZMQ and NIXL, without HTTP: tests speak to them as a server would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import zmq

from diptych.config import EngineConfig
from diptych.core.batch import FinishReason, TokenLogprobs
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import (
    AbortRequests,
    AddRequest,
    Changed,
    Drain,
    EngineLoad,
    Fatal,
    FromEngine,
    GetLoad,
    Ready,
    Reply,
    RequestFailed,
    RequestOutput,
    RequestOutputs,
    ToEngine,
)
from diptych.core.request import HandTo, Request, SamplingParams, TakeFrom

TOY_ENGINE = Path(__file__).with_name("toy_engine.py")
STARTUP_S = 120.0  # several processes on few cores


class EngineUnderTest:
    """One engine process and the server's end of its channel."""

    def __init__(self, role: str, command: list[str], config: EngineConfig, environment: dict[str, str]) -> None:
        self.role = role
        self.answers: dict[str, list[RequestOutput | RequestFailed]] = {}
        self.heard_at: dict[str, list[float]] = {}
        self._replies: list[Reply] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder = tempfile.TemporaryDirectory()
        endpoint = f"ipc://{self._folder.name}/engine"
        self.channel: Channel[ToEngine, FromEngine] = Channel(
            open_socket(self._context, endpoint, bind=True), FromEngine
        )
        self.process = subprocess.Popen(
            [*command, "--endpoint", endpoint], stdin=subprocess.PIPE, env={**os.environ, **environment}
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(config)).encode())
        self.process.stdin.close()
        try:
            self.info = self._wait_ready()
        except BaseException:
            self.kill()  # so that what it leaves behind does not fail the next test
            self._release()
            raise

    def _wait_ready(self):
        deadline = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline:
            for message in self.channel.receive_all():
                if isinstance(message, Ready):
                    return message.info
                assert not isinstance(message, Fatal), message
            assert self.process.poll() is None, "the engine died while it started"
            self.channel.socket.poll(50)
        raise AssertionError("the engine did not become ready")

    @property
    def address(self) -> TakeFrom:
        return TakeFrom(self.info.peer.address, self.info.peer.instance_id)

    def send(self, request: Request) -> None:
        self.answers[request.request_id] = []
        self.heard_at[request.request_id] = []
        self.channel.send(AddRequest(request))

    def abort(self, request_id: str) -> None:
        self.channel.send(AbortRequests([request_id]))

    def listen(self, timeout_ms: int = 20) -> None:
        self.channel.socket.poll(timeout_ms)
        for message in self.channel.receive_all():
            match message:
                case RequestOutputs(outputs=outputs):
                    for output in outputs:
                        self._note(output)
                case RequestFailed():
                    self._note(message)
                case Reply():
                    self._replies.append(message)
                case Changed(info=info):
                    self.info = info

    def _note(self, answer: RequestOutput | RequestFailed) -> None:
        if answer.request_id in self.answers:
            self.answers[answer.request_id].append(answer)
            self.heard_at[answer.request_id].append(time.monotonic())

    def is_over(self, request_id: str) -> bool:
        last = self.answers[request_id][-1:]
        return bool(last) and (isinstance(last[0], RequestFailed) or last[0].finish_reason is not None)

    def wait(self, request_id: str, timeout_s: float = 20.0) -> None:
        self.wait_until(lambda: self.is_over(request_id), f"{request_id} to be answered", timeout_s)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            self.listen()

    def tokens(self, request_id: str) -> list[int]:
        return [t for a in self.answers[request_id] if isinstance(a, RequestOutput) for t in a.token_ids]

    def logprobs(self, request_id: str) -> list[TokenLogprobs]:
        return [p for a in self.answers[request_id] if isinstance(a, RequestOutput) for p in a.logprobs]

    def reason(self, request_id: str) -> FinishReason | None:
        last = self.answers[request_id][-1]
        return last.finish_reason if isinstance(last, RequestOutput) else None

    def failure(self, request_id: str) -> RequestFailed | None:
        last = self.answers[request_id][-1]
        return last if isinstance(last, RequestFailed) else None

    def ask(self, message_of: Callable[[int], ToEngine], timeout_s: float = 60.0) -> Reply:
        """Have the engine do something, and wait for its reply; what it serves may then be something else."""
        self._replies.clear()
        self.channel.send(message_of(1))
        self.wait_until(lambda: bool(self._replies), "a reply", timeout_s)
        return self._replies[0]

    def load(self) -> EngineLoad:
        self._replies.clear()
        self.channel.send(GetLoad(1))
        self.wait_until(lambda: bool(self._replies), "the load")
        assert self._replies[0].load is not None
        return self._replies[0].load

    def wait_at_rest(self, timeout_s: float = 10.0) -> None:
        """Nothing is held: no page but cached ones, no slot, no room."""
        deadline = time.monotonic() + timeout_s
        while True:
            load = self.load()
            rooms = load.transfer.num_outgoing_rooms + load.transfer.num_incoming_rooms if load.transfer else 0
            if load.num_owned_pages == 0 and load.num_free_slots == load.num_slots and rooms == 0:
                return
            assert time.monotonic() < deadline, f"not at rest: {load}"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.channel.send(Drain(0.0))
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._release()

    def _release(self) -> None:
        self.channel.socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()


def request(request_id: str, prompt: list[int], handoff: HandTo | TakeFrom | None, **sampling: object) -> Request:
    """A greedy request."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, **sampling),
        arrival_time=time.time(),
        handoff=handoff,
    )
