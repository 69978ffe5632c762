"""The gate before the scheduler: what is held, refused, let go, and answered."""

from __future__ import annotations

import pytest

from diptych.core.batch import FinishReason
from diptych.core.messages import RequestFailed, RequestOutput
from diptych.core.request import Request, SamplingParams
from diptych.engine.gate import Gate
from diptych.errors import Overloaded, RequestError, Unavailable


def request(request_id: str) -> Request:
    return Request(request_id=request_id, prompt_token_ids=[1], sampling=SamplingParams())


class Intake:
    def __init__(self) -> None:
        self.taken: list[str] = []

    def add(self, request: Request) -> None:
        if request.request_id == "bad":
            raise Overloaded("full")
        self.taken.append(request.request_id)


def test_held_requests_pass_in_order_when_the_last_holder_lets_go() -> None:
    intake = Intake()
    gate = Gate(intake.add, max_held=3)
    gate.offer(request("a"))
    gate.hold("one")
    gate.hold("two")
    for name in ("b", "bad", "c"):
        gate.offer(request(name))
    gate.let_go("one")
    assert intake.taken == ["a"] and gate.held == ["b", "bad", "c"] and gate.reason == "two"
    gate.let_go("two")
    assert intake.taken == ["a", "b", "c"] and gate.reason is None
    (failed,) = gate.take_answers()
    assert isinstance(failed, RequestFailed) and (failed.request_id, failed.kind) == ("bad", "Overloaded")


def test_refusing_answers_what_was_held() -> None:
    intake = Intake()
    gate = Gate(intake.add, max_held=3)
    gate.hold("update")
    gate.offer(request("a"))
    gate.refuse("asleep")
    assert [(each.request_id, each.message) for each in gate.take_answers()] == [("a", "asleep")]
    with pytest.raises(Unavailable, match="asleep"):
        gate.offer(request("b"))
    gate.let_go("update")
    gate.welcome()
    gate.offer(request("c"))
    assert intake.taken == ["c"]


def test_held_requests_can_be_aborted_by_name_or_all() -> None:
    gate = Gate(Intake().add, max_held=3)
    gate.hold("update")
    for name in ("a", "b", "c"):
        gate.offer(request(name))
    gate.abort(["b", "nobody"])
    gate.abort(None)
    answers = gate.take_answers()
    assert [answer.request_id for answer in answers] == ["b", "a", "c"] and not gate.held
    assert all(isinstance(answer, RequestOutput) and answer.finish_reason is FinishReason.ABORT for answer in answers)


def test_a_held_request_is_not_lost_to_another_of_its_name() -> None:
    intake = Intake()
    gate = Gate(intake.add, max_held=3)
    gate.hold("update")
    gate.offer(request("a"))
    with pytest.raises(RequestError, match="'a' is already in use"):
        gate.offer(request("a"))
    gate.let_go("update")
    assert intake.taken == ["a"] and not gate.take_answers()


def test_no_more_is_held_than_the_scheduler_would_queue() -> None:
    gate = Gate(Intake().add, max_held=1)
    gate.hold("update")
    gate.offer(request("a"))
    with pytest.raises(Overloaded, match="1 requests are held already"):
        gate.offer(request("b"))
    assert gate.held == ["a"]
