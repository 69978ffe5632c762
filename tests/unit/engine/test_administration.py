"""Calls to workers through the engine's loop: ordered with steps, and an error of one is its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from diptych.core.batch import Batch, FinishReason, StepOutput
from diptych.core.calls import CallDone, GetWeights, SubmittedCall, WorkerCall, answered
from diptych.core.messages import AddRequest, CallWorkers, EngineInfo, Fatal, Ready, Reply
from diptych.engine.administration import Administration, Outcome, Script, Until
from diptych.engine.executor import PolledExecutor
from diptych.engine.toy import ToyExecutor, expected_output
from diptych.errors import DiptychError, RequestError, Unsupported, WorkerError

from .test_engine import INFO, Harness, request


def encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


class Recorder(ToyExecutor):
    """A toy that answers a call with how many tokens it had computed by then, and refuses tensor `bad`."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info, obey=self.obey)
        self.calls: list[WorkerCall] = []

    def obey(self, call: WorkerCall) -> bytes:
        assert isinstance(call, GetWeights)
        self.calls.append(call)
        if call.names == ["bad"]:
            raise RequestError("there is no tensor 'bad'", param="names")
        if call.names == ["broken"]:
            raise WorkerError("the device fell off the bus")
        return encoded(self.worker.num_computed_tokens)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness(Recorder(INFO))
    harness.wait_for(Ready)
    yield harness
    harness.close()


def test_a_call_is_answered_while_requests_run_and_changes_none(harness: Harness) -> None:
    each = request("a", max_tokens=100, ignore_eos=True)
    harness.channel.send(AddRequest(each))
    harness.channel.send(CallWorkers(5, GetWeights(["x"])))
    (reply,) = harness.wait_for(Reply)
    assert reply.ok and reply.call_id == 5 and msgspec.msgpack.decode(reply.value) >= 0
    token_ids, reason = harness.wait_for_end("a")
    assert token_ids == expected_output(each, vocab_size=50, max_len=128, eos_token_ids=(7,))
    assert reason is FinishReason.LENGTH


def test_the_error_of_a_call_is_its_answer_and_the_engine_goes_on(harness: Harness) -> None:
    harness.channel.send(CallWorkers(1, GetWeights(["bad"])))
    (reply,) = harness.wait_for(Reply)
    assert (reply.ok, reply.error_kind) == (False, "RequestError") and "bad" in reply.message
    harness.channel.send(CallWorkers(2, GetWeights(["x"])))
    assert harness.wait_for(Reply, 2)[1].ok
    harness.channel.send(AddRequest(request("a", max_tokens=2, ignore_eos=True)))
    assert harness.wait_for_end("a")[1] is FinishReason.LENGTH


def test_an_error_of_the_device_stops_the_engine(harness: Harness) -> None:
    harness.channel.send(CallWorkers(1, GetWeights(["broken"])))
    assert "fell off the bus" in harness.wait_for(Fatal)[0].message


def test_a_worker_without_weights_refuses() -> None:
    harness = Harness(ToyExecutor(INFO))
    harness.wait_for(Ready)
    harness.channel.send(CallWorkers(1, GetWeights(["x"])))
    assert harness.wait_for(Reply)[0].error_kind == "Unsupported"
    harness.close()


def test_a_polled_call_waits_for_the_steps_before_it() -> None:
    order: list[object] = []

    def step(batch: Batch) -> StepOutput:
        order.append(batch.step_id)
        return StepOutput(batch.step_id, [], 0.0)

    def obey(call: WorkerCall) -> bytes:
        order.append(call)
        return b""

    executor = PolledExecutor(INFO, step, obey)
    call = GetWeights([])
    executor.submit(Batch(1, [], [], []))
    executor.call(8, call)
    executor.submit(Batch(2, [], [], []))
    assert [executor.poll() for _ in range(4)] == [StepOutput(1, [], 0.0), CallDone(8), StepOutput(2, [], 0.0), None]
    assert order == [1, call, 2]
    executor.shutdown()


def test_answered_translates_errors_of_the_call_alone() -> None:
    submitted = SubmittedCall(3, GetWeights(["x"]))
    assert answered(submitted, lambda call: b"v") == CallDone(3, value=b"v")

    def refuse(call: WorkerCall) -> bytes:
        raise Unsupported("no")

    assert answered(submitted, refuse) == CallDone(3, "Unsupported", "no")

    def misname(call: WorkerCall) -> bytes:
        raise OSError(36, "File name too long")

    assert answered(submitted, misname) == CallDone(3, "RequestError", "GetWeights: [Errno 36] File name too long")

    def break_down(call: WorkerCall) -> bytes:
        raise WorkerError("gone")

    with pytest.raises(WorkerError, match="gone"):
        answered(submitted, break_down)


class Desk:
    """An Administration whose workers answer when the test says so."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.executor = ToyExecutor(INFO)
        self.executor.call = self._note  # type: ignore[method-assign]
        self.called: list[tuple[int, WorkerCall]] = []
        self.administration = Administration(self.executor, self.replies.append)

    def _note(self, call_id: int, call: WorkerCall) -> None:
        self.called.append((call_id, call))


def script_of(is_open: Callable[[], bool], seen: list[object]) -> Script:
    yield Until(is_open)
    seen.append((yield GetWeights(["a"])))
    try:
        yield GetWeights(["b"])
    except DiptychError as error:
        seen.append(type(error))
    return Outcome("done", b"end")


def test_a_script_waits_calls_sees_errors_and_ends() -> None:
    desk, gate, seen = Desk(), [False], []
    desk.administration.begin(9, script_of(lambda: gate[0], seen))
    desk.administration.turn()
    assert not desk.called and not desk.administration.is_idle
    gate[0] = True
    desk.administration.turn()
    desk.administration.finished(CallDone(desk.called[0][0], value=b"first"))
    desk.administration.finished(CallDone(desk.called[1][0], "Unsupported", "no"))
    assert seen == [b"first", Unsupported]
    assert desk.replies == [Reply(9, True, "done", value=b"end")] and desk.administration.is_idle


def test_scripts_run_side_by_side_and_a_failed_one_answers() -> None:
    desk = Desk()
    desk.administration.obey(CallWorkers(1, GetWeights(["a"])))
    desk.administration.obey(CallWorkers(2, GetWeights(["b"])))
    (first, _), (second, _) = desk.called
    desk.administration.finished(CallDone(second, "RequestError", "no b"))
    desk.administration.finished(CallDone(first, value=b"v"))
    assert desk.replies == [Reply(2, False, "no b", error_kind="RequestError"), Reply(1, True, value=b"v")]
