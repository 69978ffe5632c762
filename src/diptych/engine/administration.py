"""What an engine is told besides requests: scripts that ask the workers, wait for the scheduler, and end in a reply.

A script is a generator. It yields a `WorkerCall`, and goes on with what the workers answer or with the error that they
report; or it yields `Until`, and goes on when that holds. Scripts run side by side, between the steps of the engine's
loop, and one that fails is answered with its error; the engine goes on. Engine thread; never imports torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass

from diptych.core.calls import CallDone, WorkerCall
from diptych.core.messages import CallWorkers, Reply
from diptych.engine.executor import Executor
from diptych.errors import DiptychError, error_of_kind


@dataclass(frozen=True, slots=True)
class Until:
    """What a script waits for; asked once a turn of the engine's loop, and must be cheap."""

    holds: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a script ends with. message: a sentence for people. value: msgpack, of the form that the message says."""

    message: str = ""
    value: bytes = b""


Script = Generator[WorkerCall | Until, bytes, Outcome]


def pass_on(call: WorkerCall) -> Script:
    """The script of a call that only the workers need to know of."""
    return Outcome(value=(yield call))


class Administration:
    """Runs scripts over one executor.

    Args: answer: sends a reply to the server.
    """

    def __init__(self, executor: Executor, answer: Callable[[Reply], None]) -> None:
        self._executor = executor
        self._answer = answer
        self._call_ids = itertools.count(1)
        self._called: dict[int, tuple[int, Script]] = {}  # by the workers' call, with the server's
        self._waiting: list[tuple[int, Script, Until]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no script is under way."""
        return not (self._called or self._waiting)

    def obey(self, message: CallWorkers) -> None:
        """Begin what the server asks for."""
        self.begin(message.call_id, pass_on(message.call))

    def begin(self, call_id: int, script: Script) -> None:
        """Run a script as far as it goes; its reply bears the server's `call_id`."""
        self._go_on(call_id, script, lambda: next(script))

    def finished(self, done: CallDone) -> None:
        """The workers have answered."""
        call_id, script = self._called.pop(done.call_id)
        if done.error_kind is None:
            self._go_on(call_id, script, lambda: script.send(done.value))
        else:
            error = error_of_kind(done.error_kind, done.error or "")
            self._go_on(call_id, script, lambda: script.throw(error))

    def turn(self) -> None:
        """Go on with every script whose wait is over."""
        waiting, self._waiting = self._waiting, []
        for call_id, script, until in waiting:
            if until.holds():
                self._go_on(call_id, script, lambda script=script: next(script))  # type: ignore[misc]
            else:
                self._waiting.append((call_id, script, until))

    def _go_on(self, call_id: int, script: Script, resume: Callable[[], WorkerCall | Until]) -> None:
        try:
            wanted = resume()
            while isinstance(wanted, Until) and wanted.holds():
                wanted = next(script)
        except StopIteration as end:
            outcome: Outcome = end.value
            self._answer(Reply(call_id, True, outcome.message, value=outcome.value))
        except DiptychError as error:
            self._answer(Reply(call_id, False, str(error), error_kind=type(error).__name__))
        else:
            if isinstance(wanted, Until):
                self._waiting.append((call_id, script, wanted))
            else:
                worker_call_id = next(self._call_ids)
                self._called[worker_call_id] = (call_id, script)
                self._executor.call(worker_call_id, wanted)
