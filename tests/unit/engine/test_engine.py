"""The engine's loop over real ZMQ sockets and the toy worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from diptych.config import EngineConfig, SchedulerConfig
from diptych.core.batch import Batch, FinishReason, StepOutput
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import (
    AbortRequests,
    AddRequest,
    Drain,
    EngineInfo,
    Fatal,
    FlushCache,
    FromEngine,
    GetLoad,
    Ready,
    Reply,
    RequestFailed,
    RequestOutputs,
    Stopped,
    ToEngine,
)
from diptych.core.request import Request, SamplingParams
from diptych.engine.engine import EngineCore
from diptych.engine.executor import Executor
from diptych.engine.toy import ToyExecutor, expected_output
from diptych.errors import WorkerError

INFO = EngineInfo(
    model_path="toy",
    architecture="Toy",
    dtype="int32",
    vocab_size=50,
    max_model_len=128,
    eos_token_ids=(7,),
    page_size=4,
    num_pages=64,
    page_nbytes=16,
    max_num_seqs=8,
    device="cpu",
    attention_backend="none",
    load_s=0.0,
)


class Harness:
    """An EngineCore on a thread, and the server's end of its channel."""

    def __init__(self, executor: Executor) -> None:
        config = EngineConfig(scheduler=SchedulerConfig(check_invariants=True))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel: Channel[ToEngine, FromEngine] = Channel(
            open_socket(self.context, "inproc://engine", bind=True), FromEngine
        )
        inner: Channel[FromEngine, ToEngine] = Channel(
            open_socket(self.context, "inproc://engine", bind=False), ToEngine
        )
        self.core = EngineCore(config, executor, inner)
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.messages: list[FromEngine] = []

    def _run(self) -> None:
        self.status = self.core.run()

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 10.0) -> list:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.messages += self.channel.receive_all()
            found = [message for message in self.messages if isinstance(message, kind)]
            if len(found) >= count:
                return found
            self.channel.socket.poll(20)
        raise AssertionError(f"no {count} x {kind.__name__} in {self.messages}")

    def wait_for_end(self, request_id: str, timeout_s: float = 10.0) -> tuple[list[int], FinishReason]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.messages += self.channel.receive_all()
            outputs = [
                output
                for message in self.messages
                if isinstance(message, RequestOutputs)
                for output in message.outputs
                if output.request_id == request_id
            ]
            if outputs and outputs[-1].finish_reason is not None:
                return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason
            self.channel.socket.poll(20)
        raise AssertionError(f"{request_id} was not answered")

    def close(self) -> None:
        if self.thread.is_alive():
            self.channel.send(Drain(0.0))
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.channel.close()
        self.context.term()


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness(ToyExecutor(INFO))
    harness.wait_for(Ready)
    yield harness
    harness.close()


def request(request_id: str, **sampling: object) -> Request:
    return Request(request_id=request_id, prompt_token_ids=[3, 1, 4, 1, 5], sampling=SamplingParams(**sampling))


def test_serves_requests_and_drains(harness: Harness) -> None:
    requests = [request(f"r{i}", max_tokens=4 + i, ignore_eos=True) for i in range(20)]
    for each in requests:
        harness.channel.send(AddRequest(each))
    for each in requests:
        token_ids, reason = harness.wait_for_end(each.request_id)
        assert token_ids == expected_output(each, vocab_size=50, max_len=128, eos_token_ids=(7,))
        assert reason is FinishReason.LENGTH
    harness.channel.send(Drain(5.0))
    harness.wait_for(Stopped)
    harness.thread.join(5)
    assert harness.status == 0


def test_refusals_name_their_error(harness: Harness) -> None:
    harness.channel.send(AddRequest(replace_prompt(request("long"), [1] * 200)))
    harness.channel.send(AddRequest(replace_prompt(request("empty"), [])))
    long, empty = harness.wait_for(RequestFailed, 2)
    assert (long.kind, long.param) == ("PromptTooLong", "prompt")
    assert (empty.kind, empty.param) == ("RequestError", "prompt")


def replace_prompt(template: Request, token_ids: list[int]) -> Request:
    return Request(request_id=template.request_id, prompt_token_ids=token_ids, sampling=template.sampling)


def test_abort_of_all_and_of_unknown(harness: Harness) -> None:
    for i in range(3):
        harness.channel.send(AddRequest(request(f"r{i}", max_tokens=100, ignore_eos=True)))
    harness.channel.send(AbortRequests(["nobody"]))
    harness.channel.send(AbortRequests(None))
    for i in range(3):
        assert harness.wait_for_end(f"r{i}")[1] in (FinishReason.ABORT, FinishReason.LENGTH)


def test_load_and_flush(harness: Harness) -> None:
    harness.channel.send(AddRequest(request("a", max_tokens=4, ignore_eos=True)))
    harness.wait_for_end("a")
    harness.channel.send(GetLoad(1))
    (reply,) = harness.wait_for(Reply)
    assert reply.load.num_cached_pages == 2 and reply.load.num_owned_pages == 0
    assert reply.load.generation_tokens_total == 4
    harness.channel.send(FlushCache(2))
    assert harness.wait_for(Reply, 2)[1].ok


def test_foreign_bytes_are_dropped(harness: Harness) -> None:
    for frame in (b"", b"\xff\x00garbage", b"\x80\x04\x95pickle", b"\x93" * 1000):
        harness.channel.socket.send(frame)
    harness.channel.send(AddRequest(request("a", max_tokens=2, ignore_eos=True)))
    assert harness.wait_for_end("a")[1] is FinishReason.LENGTH


def test_drain_aborts_what_is_left_at_its_deadline() -> None:
    slow = SlowExecutor(INFO)
    harness = Harness(slow)
    harness.wait_for(Ready)
    harness.channel.send(AddRequest(request("a", max_tokens=100, ignore_eos=True)))
    harness.wait_for(RequestOutputs)
    harness.channel.send(Drain(0.1))
    harness.channel.send(AddRequest(request("late", max_tokens=2)))
    assert harness.wait_for_end("a")[1] is FinishReason.ABORT
    assert harness.wait_for(RequestFailed)[0].kind == "Unavailable"
    harness.wait_for(Stopped)
    harness.close()
    assert harness.status == 0


class SlowExecutor(ToyExecutor):
    """A toy that takes its time."""

    def poll(self) -> StepOutput | None:
        time.sleep(0.02)
        return super().poll()


class BreakingExecutor(ToyExecutor):
    """A toy whose third step fails, as a device error would."""

    steps = 0

    def submit(self, batch: Batch) -> None:
        self.steps += 1
        super().submit(batch)

    def poll(self) -> StepOutput | None:
        if self.steps >= 3:
            raise WorkerError("the device fell off the bus")
        return super().poll()


def test_a_failed_step_answers_everyone_and_stops() -> None:
    harness = Harness(BreakingExecutor(INFO))
    harness.wait_for(Ready)
    for i in range(3):
        harness.channel.send(AddRequest(request(f"r{i}", max_tokens=50, ignore_eos=True)))
    (fatal,) = harness.wait_for(Fatal)
    assert "fell off the bus" in fatal.message
    failed = {message.request_id for message in harness.messages if isinstance(message, RequestFailed)}
    assert failed and failed <= {"r0", "r1", "r2"}
    harness.close()
    assert harness.status == 1


def test_info_is_what_the_worker_said() -> None:
    harness = Harness(ToyExecutor(replace_info(max_model_len=64)))
    (ready,) = harness.wait_for(Ready)
    assert ready.info.max_model_len == 64
    harness.close()


def replace_info(**changes: object) -> EngineInfo:
    values = {name: getattr(INFO, name) for name in INFO.__struct_fields__}
    return EngineInfo(**(values | changes))
