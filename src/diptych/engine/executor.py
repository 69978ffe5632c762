"""How batches reach workers. One rank: a thread of the engine's process.

The engine stays responsive (cancels, heartbeats) while a step computes, and only immutable messages cross the threads.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from diptych.config import EngineConfig
from diptych.core.batch import Batch, StepOutput
from diptych.core.calls import CallDone, SubmittedCall, WorkerCall, answered
from diptych.core.messages import EngineInfo, Loading
from diptych.engine.waking_queue import WakingQueue
from diptych.errors import DiptychError, Unsupported, WorkerError

if TYPE_CHECKING:
    import zmq

    from diptych.engine.agents import AgentChannel
    from diptych.parallel.world import World
    from diptych.worker.runner import PendingStep
    from diptych.worker.worker import Worker


class Executor(Protocol):
    """Runs batches, in order, on one or more workers."""

    def start(self) -> None:
        """Begin to load; `poll_loading` tells how it goes."""
        ...

    def poll_loading(self) -> Loading | EngineInfo | None:
        """The next news of loading, if any. Raises what loading failed with (ConfigError, WorkerError)."""
        ...

    def submit(self, batch: Batch) -> None:
        """Queue a batch; never blocks."""
        ...

    def call(self, call_id: int, call: WorkerCall) -> None:
        """Have every worker obey once the steps submitted so far are done, before any later one; never blocks."""
        ...

    def poll(self) -> StepOutput | CallDone | None:
        """The oldest finished step or call, if any. Raises WorkerError if a step failed: the engine must stop."""
        ...

    @property
    def wake_fd(self) -> int | zmq.Socket[bytes]:
        """For a poller: readable when `poll_loading` or `poll` may have news; drained by them."""
        ...

    @property
    def agent_channel(self) -> AgentChannel | None:
        """To the transfer agents in the ranks' processes; None where the only rank is a thread of this one."""
        ...

    def shutdown(self) -> None:
        """End the workers after the step that runs now."""
        ...


class InProcessExecutor:
    """One worker on a thread of this process.

    Args: config: resolved. open_world: meets the other ranks, on that thread; None: there are none.
    """

    def __init__(self, config: EngineConfig, *, open_world: Callable[[], World] | None = None) -> None:
        self._config = config
        self._open_world = open_world
        self._work: queue.SimpleQueue[Batch | SubmittedCall | PendingStep | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._news: WakingQueue[Loading | EngineInfo | StepOutput | CallDone | Exception] = WakingQueue()
        self._thread = threading.Thread(target=self._run, name="diptych-worker", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="diptych-device", daemon=True)

    @property
    def wake_fd(self) -> int:
        return self._news.wake_fd

    def start(self) -> None:
        self._thread.start()

    def poll_loading(self) -> Loading | EngineInfo | None:
        news = self._take()
        assert not isinstance(news, StepOutput | CallDone), "a step finished before loading did"
        return news

    def submit(self, batch: Batch) -> None:
        self._work.put(batch)

    def call(self, call_id: int, call: WorkerCall) -> None:
        self._work.put(SubmittedCall(call_id, call))

    def poll(self) -> StepOutput | CallDone | None:
        news = self._take()
        assert not isinstance(news, Loading | EngineInfo), "loading news after it was done"
        return news

    @property
    def agent_channel(self) -> None:
        return None

    def shutdown(self) -> None:
        self._work.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._launched.put(None)
        if self._watcher.is_alive():
            self._watcher.join()
        self._news.close()

    def _take(self) -> Loading | EngineInfo | StepOutput | CallDone | None:
        news = self._news.take()
        if isinstance(news, DiptychError):
            raise news
        if isinstance(news, Exception):
            raise WorkerError(f"{type(news).__name__}: {news}") from news
        return news

    def _run(self) -> None:
        """The worker's thread: load, then launch batches and collect those that the device has computed, until told to
        end.
        """
        try:
            # Imported here: torch takes seconds, and whoever only plans must not pay for it.
            from diptych.worker.worker import create_worker

            with contextlib.ExitStack() as stack:
                world = None if self._open_world is None else stack.enter_context(self._open_world())
                worker = create_worker(
                    self._config, lambda what, done, total: self._news.put(Loading(what, done, total)), world
                )
                self._news.put(worker.info)
                self._serve(worker)
        except Exception as error:
            self._news.put(error)

    def _serve(self, worker: Worker) -> None:
        outstanding: deque[PendingStep] = deque()
        while (work := self._work.get()) is not None:
            if isinstance(work, Batch):
                outstanding.append(worker.launch(work))
                if not outstanding[-1].is_done:
                    self._watch_over(outstanding[-1])
            elif isinstance(work, SubmittedCall):
                while outstanding:
                    outstanding[0].wait()
                    self._news.put(outstanding.popleft().collect())
                self._news.put(answered(work, worker.obey))
            while outstanding and outstanding[0].is_done:
                self._news.put(outstanding.popleft().collect())

    def _watch_over(self, step: PendingStep) -> None:
        if not self._watcher.is_alive():
            self._watcher.start()
        self._launched.put(step)

    def _watch(self) -> None:
        """The watcher's thread: hand every step back when the device is done, so that the worker need not wait."""
        try:
            while (step := self._launched.get()) is not None:
                step.wait()
                self._work.put(step)
        except Exception as error:
            self._news.put(error)


def refuse_call(call: WorkerCall) -> bytes:
    """What a worker without weights says to any call."""
    raise Unsupported(f"{type(call).__name__} is nothing that this worker can do: it has no weights")


class PolledExecutor:
    """Runs a batch on the engine's own thread, when its result is asked for: for workers that have nothing to load.

    Args: step: computes a batch. obey: does what a call asks; without it every call is refused.
    """

    def __init__(
        self,
        info: EngineInfo,
        step: Callable[[Batch], StepOutput],
        obey: Callable[[WorkerCall], bytes] = refuse_call,
    ) -> None:
        self._info: EngineInfo | None = info
        self._step = step
        self._obey = obey
        self._work: deque[Batch | SubmittedCall] = deque()
        self._wake_read, self._wake_write = os.pipe()

    @property
    def wake_fd(self) -> int:
        return self._wake_read

    @property
    def has_work(self) -> bool:
        """Whether a batch or a call waits."""
        return bool(self._work)

    def start(self) -> None:
        """Nothing to load."""

    def poll_loading(self) -> Loading | EngineInfo | None:
        info, self._info = self._info, None
        return info

    def submit(self, batch: Batch) -> None:
        self._work.append(batch)
        os.write(self._wake_write, b"\0")

    def call(self, call_id: int, call: WorkerCall) -> None:
        self._work.append(SubmittedCall(call_id, call))
        os.write(self._wake_write, b"\0")

    def poll(self) -> StepOutput | CallDone | None:
        if not self._work:
            return None
        os.read(self._wake_read, 1)
        work = self._work.popleft()
        return self._step(work) if isinstance(work, Batch) else answered(work, self._obey)

    @property
    def agent_channel(self) -> None:
        return None

    def shutdown(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)
