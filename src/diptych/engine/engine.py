"""The engine's loop: intake, plan, submit, apply. One thread, whatever the role and depth.

Owns the scheduler and the sockets; talks to its worker through an executor and to its server through a channel. Never
imports torch (the executor's thread does).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq

from diptych.config import EngineConfig
from diptych.core.calls import CallDone
from diptych.core.channel import Channel
from diptych.core.messages import (
    AbortRequests,
    AddAdapter,
    AddRequest,
    AdministrativeCall,
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
    RemoveAdapter,
    Reply,
    RequestFailed,
    RequestOutput,
    RequestOutputs,
    Stopped,
    ToEngine,
)
from diptych.core.request import Request
from diptych.engine.adapters import Adapters
from diptych.engine.administration import Administration
from diptych.engine.executor import Executor
from diptych.engine.gate import Gate
from diptych.engine.membership import Membership
from diptych.engine.roles import create_scheduler
from diptych.engine.upkeep import Upkeep
from diptych.errors import ConfigError, DiptychError, InvariantError, Unavailable, Unsupported
from diptych.scheduler.groups import AnyScheduler

if TYPE_CHECKING:
    from diptych.engine.peering import Peering

logger = logging.getLogger(__name__)

LOAD_REPORT_INTERVAL_S = 0.5
IDLE_WAIT_MS = 250
# Seconds past its deadline after which a drain ends whatever a peer still holds: a frozen one may never let go.
DRAIN_GRACE_S = 1.0


@dataclass(slots=True)
class Clockwork:
    """Where the loop's time goes, and when it last reported.

    host_s: CPU time of the engine's thread, for on a busy machine its wall time tells of others' work.
    """

    host_s: float = 0.0
    compute_s: float = 0.0
    reported_at: float = 0.0
    reported_tokens: int = 0
    tokens_per_s: float = 0.0


class EngineCore:
    """Serves one channel until drained or broken.

    Args: config: resolved. executor: not started yet. channel: to the server; this object closes it.
    """

    def __init__(self, config: EngineConfig, executor: Executor, channel: Channel[FromEngine, ToEngine]) -> None:
        self._config = config
        self._executor = executor
        self._channel = channel
        self._poller = zmq.Poller()
        self._poller.register(channel.socket, zmq.POLLIN)
        self._poller.register(executor.wake_fd, zmq.POLLIN)
        self._clockwork = Clockwork()
        self._drain_deadline: float | None = None
        self._membership = Membership(config, self._poller, executor.agent_channel)
        self._replies: list[Reply | Changed] = []  # they leave after the outputs that came before them
        self._administration = Administration(executor, self._replies.append)
        self._gate: Gate
        self._adapters: Adapters
        self._upkeep: Upkeep

    @property
    def _peering(self) -> Peering | None:
        return self._membership.peering

    def run(self) -> int:
        """Load, serve, end. Returns the process's exit status: 0 after a drain, 1 after an error (already reported)."""
        try:
            self._executor.start()
            info = self._load()
            if info is not None:
                self._serve(info)
            self._channel.send(Stopped())
            return 0
        except Exception as error:
            fatal = _as_fatal(error)
            logger.error("the engine stops: %s", fatal, exc_info=not isinstance(fatal, ConfigError))
            self._channel.send(Fatal(str(fatal), type(fatal).__name__))
            return 1
        finally:
            if self._membership.peering is not None:
                self._membership.peering.close()
            self._executor.shutdown()
            self._channel.close()

    def _load(self) -> EngineInfo | None:
        """Wait for the worker, passing progress on. None: told to stop before it was done."""
        while True:
            news = self._executor.poll_loading()
            if isinstance(news, EngineInfo):
                return news
            if isinstance(news, Loading):
                self._channel.send(news)
                continue
            for message in self._channel.receive_all():
                if isinstance(message, Drain):
                    return None
                self._refuse(message)
            self._poller.poll(IDLE_WAIT_MS)

    def _refuse(self, message: ToEngine) -> None:
        """Every request is answered, even one that comes too early."""
        if isinstance(message, AddRequest):
            error = Unavailable("the engine is still loading; try again later")
            self._channel.send(RequestFailed.of(message.request.request_id, error))
        elif isinstance(message, FlushCache | GetLoad | AdministrativeCall):
            self._channel.send(Reply(message.call_id, False, "the engine is still loading", error_kind="Unavailable"))

    def _serve(self, info: EngineInfo) -> None:
        info = self._membership.join(info)
        scheduler = create_scheduler(self._config, info, self._peering)
        self._adapters = Adapters(scheduler, info.max_loras)
        self._gate = Gate(self._add, max_held=scheduler.limits.max_queued_requests)
        self._upkeep = Upkeep(scheduler, self._gate, self._membership, info=info, tell=self._replies.append)
        self._channel.send(Ready(info))
        try:
            while not self._has_drained(scheduler):
                self._turn(scheduler)
        except Exception as error:
            fatal = _as_fatal(error)
            for request_id in (*scheduler.open_requests(), *self._gate.held):
                self._channel.send(RequestFailed.of(request_id, fatal))
            raise fatal from error

    def _turn(self, scheduler: AnyScheduler) -> None:
        """One round: take messages and finished steps, plan and submit what can run, answer, then wait for news."""
        started = time.thread_time()
        for message in self._channel.receive_all():
            self._obey(scheduler, message)
        if self._peering is not None:
            self._peering.turn(self._adapters.admit, refusal=self._gate.reason)
        if isinstance(output := self._executor.poll(), CallDone):
            self._administration.finished(output)
        elif output is not None:
            scheduler.apply(output)
            self._clockwork.compute_s += output.compute_s
            if self._config.scheduler.check_invariants:
                self._check(scheduler)
        self._administration.turn()
        if (batch := scheduler.plan()) is not None:
            self._executor.submit(batch)
        self._send_answers(scheduler)
        self._clockwork.host_s += time.thread_time() - started
        if batch is None and output is None:
            if scheduler.is_idle:
                self._check(scheduler)
            self._poller.poll(IDLE_WAIT_MS)

    def _check(self, scheduler: AnyScheduler) -> None:
        scheduler.check()
        if self._peering is not None:
            self._peering.hinge.check()

    def _obey(self, scheduler: AnyScheduler, message: ToEngine) -> None:
        match message:
            case AddRequest(request=request):
                try:
                    self._gate.offer(request)
                except DiptychError as error:
                    self._channel.send(RequestFailed.of(request.request_id, error))
            case AbortRequests(request_ids=request_ids):
                self._gate.abort(request_ids)
                for request_id in scheduler.open_requests() if request_ids is None else request_ids:
                    scheduler.abort(request_id)
            case FlushCache(call_id=call_id):
                flushed = scheduler.flush_cache()
                text = "prefix cache flushed" if flushed else "requests are running; flush when the engine is idle"
                self._channel.send(Reply(call_id, flushed, text))
            case GetLoad(call_id=call_id):
                self._channel.send(Reply(call_id, True, load=self._measure_load(scheduler)))
            case Drain(timeout_s=timeout_s):
                self._drain_deadline = time.monotonic() + timeout_s
                self._upkeep.end_pause()
                self._gate.refuse("the engine is shutting down; send the request elsewhere")
                if self._peering is not None:
                    self._peering.hinge.leave(timeout_s)
            case CallWorkers():
                self._administration.obey(message)
            case AddAdapter() | RemoveAdapter():
                self._administration.begin(message.call_id, self._adapters.script(message))
            case _:
                self._administration.begin(message.call_id, self._upkeep.script(message))

    def _add(self, request: Request) -> None:
        if self._peering is not None:
            self._peering.add(request, self._adapters.admit)
        elif request.handoff is None:
            self._adapters.admit(request)
        else:
            raise Unsupported(
                "this engine has no peers; start it with --role prefill or --role decode", "bootstrap_host"
            )

    def _send_answers(self, scheduler: AnyScheduler) -> None:
        answers = [*self._gate.take_answers(), *scheduler.take_answers()]
        self._adapters.note_answers(answers)
        outputs = [answer for answer in answers if isinstance(answer, RequestOutput)]
        is_due = time.monotonic() - self._clockwork.reported_at >= LOAD_REPORT_INTERVAL_S
        if outputs or is_due:
            load = self._report_load(scheduler) if is_due else None
            self._channel.send(RequestOutputs(outputs, load))
        for answer in answers:
            if isinstance(answer, RequestFailed):
                self._channel.send(answer)
        for reply in self._replies:
            self._channel.send(reply)
        self._replies.clear()

    def _report_load(self, scheduler: AnyScheduler) -> EngineLoad:
        """The load, with the generation rate since the last report."""
        clockwork, now = self._clockwork, time.monotonic()
        total = scheduler.counters.generation_tokens_total
        elapsed = now - clockwork.reported_at
        clockwork.tokens_per_s = (total - clockwork.reported_tokens) / elapsed if clockwork.reported_at else 0.0
        clockwork.reported_at, clockwork.reported_tokens = now, total
        return self._measure_load(scheduler)

    def _measure_load(self, scheduler: AnyScheduler) -> EngineLoad:
        clockwork = self._clockwork
        load, peering = scheduler.load(), self._peering
        num_quarantined = load.num_quarantined_pages
        return msgspec.structs.replace(
            load,
            transfer=None if peering is None else peering.load(num_quarantined, scheduler.num_awaiting_pages),
            generation_tokens_per_s=clockwork.tokens_per_s,
            host_s_total=clockwork.host_s,
            compute_s_total=clockwork.compute_s,
        )

    def _has_drained(self, scheduler: AnyScheduler) -> bool:
        """Whether a drain was asked for and nothing is left; past its deadline, what is left is aborted, then left."""
        if self._drain_deadline is None:
            return False
        if scheduler.is_idle and (self._peering is None or self._peering.hinge.sender.is_idle):
            return True
        late_s = time.monotonic() - self._drain_deadline
        if late_s >= 0:
            for request_id in scheduler.open_requests():
                scheduler.abort(request_id)
            self._send_answers(scheduler)
        return late_s >= DRAIN_GRACE_S


def _as_fatal(error: Exception) -> DiptychError:
    """What ends the engine, in our terms: whatever we did not foresee is a bug of ours."""
    return error if isinstance(error, DiptychError) else InvariantError(f"{type(error).__name__}: {error}")
