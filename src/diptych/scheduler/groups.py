"""Data-parallel attention: one scheduler a group of ranks, behind the face of one.

Every group has sequences, slots and pages of its own; the layers between attention are computed by all groups together,
so that all take every step at once: a group with nothing to do takes an empty one, and each batch says how much all of
them bring. Nothing is voted on. Engine thread; never imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields

import msgspec

from diptych.core.batch import Batch, StepOutput
from diptych.core.messages import EngineLoad, RequestFailed
from diptych.core.request import Request
from diptych.errors import InvariantError, RequestError, Unsupported
from diptych.scheduler.adapter_slots import AdapterSlots
from diptych.scheduler.scheduler import Answer, Scheduler
from diptych.scheduler.step import Counters, SchedulerLimits

_NOT_SUMMED = {"timestamp", "page_size", "generation_tokens_per_s", "steps_total", "transfer"}


class GroupedScheduler:
    """Has a `Scheduler`'s methods. Args: groups: one each, alike, without peers, with one step in flight at most."""

    def __init__(self, groups: Sequence[Scheduler]) -> None:
        self._groups = tuple(groups)
        self._open: dict[str, int] = {}  # requests by group
        self._inflight: deque[list[int]] = deque()  # groups with rows in the step
        self._num_steps = 0

    @property
    def limits(self) -> SchedulerLimits:
        """Those of every group."""
        return self._groups[0].limits

    @limits.setter
    def limits(self, limits: SchedulerLimits) -> None:
        for group in self._groups:
            group.limits = limits

    @property
    def counters(self) -> Counters:
        """Of all groups together."""
        each = [asdict(group.counters) for group in self._groups]
        totals = {item.name: sum(counters[item.name] for counters in each) for item in fields(Counters)}
        return Counters(**(totals | {"steps_total": self._num_steps}))

    @property
    def adapters(self) -> AdapterSlots:
        """Of none: adapters are not served with several groups."""
        return self._groups[0].adapters

    @property
    def is_idle(self) -> bool:
        """Whether every group is."""
        return all(group.is_idle for group in self._groups)

    @property
    def num_awaiting_pages(self) -> int:
        """None of them has a peer."""
        return 0

    @property
    def num_inflight_steps(self) -> int:
        """Steps of all groups together, submitted and not yet applied."""
        return len(self._inflight)

    def add(self, request: Request) -> None:
        """Queue a request in the group with the fewest. Raises RequestError or Overloaded: nothing has changed."""
        if request.request_id in self._open:
            raise RequestError(f"request_id {request.request_id!r} is already in use", param="request_id")
        if request.sampling.prompt_logprobs is not None:
            raise Unsupported("logprobs of the prompt are not served with dp_size above 1", "prompt_logprobs")
        loads = [0] * len(self._groups)
        for index in self._open.values():
            loads[index] += 1
        index = loads.index(min(loads))
        self._groups[index].add(request)
        self._open[request.request_id] = index

    def abort(self, request_id: str) -> None:
        """As a scheduler's."""
        if request_id in self._open:
            self._groups[self._open[request_id]].abort(request_id)

    def open_requests(self) -> list[str]:
        """Ids of requests that have not been answered to the end."""
        return [request_id for group in self._groups for request_id in group.open_requests()]

    def take_answers(self) -> list[Answer]:
        """Everything to tell clients since the last call, in order for each of them."""
        answers = [answer for group in self._groups for answer in group.take_answers()]
        for answer in answers:
            if isinstance(answer, RequestFailed) or answer.finish_reason is not None:
                self._open.pop(answer.request_id, None)
        return answers

    def plan(self) -> Batch | None:
        """The next step, with a batch for each group, or None when none has work. The caller must submit it."""
        if len(self._inflight) >= self.limits.max_inflight_steps > 0:
            return None
        planned = [group.plan() for group in self._groups]
        working = [index for index, batch in enumerate(planned) if batch is not None]
        if not working:
            return None
        # A group with nothing to do computes one token for nobody: an empty step would be a case of its own everywhere.
        num_tokens = [1 if batch is None else batch.num_tokens for batch in planned]
        num_rows = [1 if batch is None else sum(step.samples for step in batch.steps) for batch in planned]
        self._num_steps += 1
        self._inflight.append(working)
        batches = [
            msgspec.structs.replace(batch or Batch(0, [], [], []), group_tokens=num_tokens, group_rows=num_rows)
            for batch in planned
        ]
        return Batch(self._num_steps, [], [], [], groups=batches)

    def apply(self, output: StepOutput) -> None:
        """Account for the oldest step in flight. Raises InvariantError if `output` is not of all groups."""
        if len(output.groups) != len(self._groups):
            raise InvariantError(f"a step of {len(self._groups)} groups has {len(output.groups)} results")
        for index in self._inflight.popleft():
            self._groups[index].apply(output.groups[index])

    def load(self) -> EngineLoad:
        """Gauges and totals of now, of all groups together."""
        loads = [group.load() for group in self._groups]
        names = [name for name in EngineLoad.__struct_fields__ if name not in _NOT_SUMMED]
        each = [msgspec.structs.asdict(load) for load in loads]
        totals = {name: sum(load[name] for load in each) for name in names}
        return msgspec.structs.replace(loads[0], **totals, steps_total=self._num_steps)

    def flush_cache(self) -> bool:
        """Empty every group's prefix cache; False while any request is open."""
        if not self.is_idle:
            return False
        for group in self._groups:
            group.flush_cache()
        return True

    def outdate_cache(self) -> None:
        """As a scheduler's, in every group."""
        for group in self._groups:
            group.outdate_cache()

    def retract_running(self) -> None:
        """As a scheduler's, in every group."""
        for group in self._groups:
            group.retract_running()

    def check(self) -> None:
        """Raise InvariantError unless every group's books balance."""
        for group in self._groups:
            group.check()


AnyScheduler = Scheduler | GroupedScheduler
