"""What is done to an engine while it serves: its weights replaced, its memory released, its requests paused.

Each is a script (`engine.administration`) that first settles what becomes of the requests in flight, then has the
workers act, and at last tells the server and, by joining anew, the peers. One at a time. Engine thread; never imports
torch.

Requests in flight are finished ("wait"), aborted ("abort"), computed again from what they have said so far ("retract"),
or go on with the pages that they have ("keep": tokens computed before and after stand in one context). Nobody else ever
reads pages of before: the prefix cache is outdated in the same turn in which the workers are told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import replace

import msgspec

from diptych.core.calls import CommitWeights, FreeMemory, MemoryTag, RestoreMemory
from diptych.core.messages import (
    Changed,
    ContinueGeneration,
    EngineInfo,
    InFlight,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
    UpkeepCall,
)
from diptych.engine.administration import Outcome, Script, Until
from diptych.engine.gate import Gate
from diptych.engine.membership import Membership
from diptych.errors import DiptychError, Unavailable
from diptych.scheduler.groups import AnyScheduler
from diptych.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

UPDATING = "the engine's weights are being replaced; try again later"
PAUSED = "generation is paused; POST /continue_generation"
SETTLE_S = 150.0
"""How long peers may take to let go of pages: longer than any transfer by its own deadline."""

Steps = Generator[Until, bytes, None]
_AT_ONCE = Until(lambda: True)


class Upkeep:
    """One engine's. info: what is served now. tell: sends to the server what has changed."""

    def __init__(
        self,
        scheduler: AnyScheduler,
        gate: Gate,
        membership: Membership,
        *,
        info: EngineInfo,
        tell: Callable[[Changed], None],
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._gate = gate
        self._membership = membership
        self._tell = tell
        self._is_busy = False
        self._limits = scheduler.limits

    def script(self, message: UpkeepCall) -> Script:
        """What a message of the server asks for."""
        match message:
            case UpdateWeights():
                return self._in_turn(self._update(message))
            case SetWeightVersion(weight_version=weight_version):
                return self._in_turn(self._set_version(weight_version))
            case PauseGeneration(mode=mode):
                return self._in_turn(self._pause(mode))
            case ContinueGeneration():
                return self._in_turn(self._continue())
            case ReleaseMemory():
                return self._in_turn(self._release(message))
            case ResumeMemory(tags=tags):
                return self._in_turn(self._resume(tags))

    def end_pause(self) -> None:
        """Plan steps again, if they were paused."""
        self._scheduler.limits = self._limits
        self._gate.let_go(PAUSED)

    def _in_turn(self, script: Script) -> Script:
        yield Until(lambda: not self._is_busy)
        self._is_busy = True
        try:
            return (yield from script)
        finally:
            self._is_busy = False

    # ------------------------------------------------------------------ weights

    def _update(self, message: UpdateWeights) -> Script:
        if "weights" in self.info.released:
            raise Unavailable("the weights are released; POST /resume_memory_occupation first")
        if message.checkpoint is not None:
            yield message.checkpoint
        num_open = len(self._scheduler.open_requests())
        # Those that are paused cannot be waited for: they go on after the pause.
        in_flight = "keep" if self.info.is_paused and message.in_flight == "wait" else message.in_flight
        try:
            yield from self._settle(in_flight, UPDATING)
            self._scheduler.outdate_cache()
            fingerprint = msgspec.msgpack.decode((yield CommitWeights(message.update_id)), type=str)
            self._change(fingerprint=fingerprint, weight_version=message.weight_version or self.info.weight_version)
            self._rejoin()
        finally:
            self._plan(is_paused=self.info.is_paused)
            self._gate.let_go(UPDATING)
        logger.info("weights are replaced: version %s, fingerprint %s", self.info.weight_version, self.info.fingerprint)
        return Outcome("weights are replaced", msgspec.msgpack.encode(num_open))

    def _set_version(self, weight_version: str) -> Script:
        try:
            yield from self._settle("keep", UPDATING)
            self._change(weight_version=weight_version)
            self._rejoin()
        finally:
            self._plan(is_paused=self.info.is_paused)
            self._gate.let_go(UPDATING)
        return Outcome(f"weight version is {weight_version} now")

    def _settle(self, in_flight: InFlight, reason: str) -> Steps:
        """Take in nothing new, and see to it that what runs is where `in_flight` wants it."""
        self._gate.hold(reason)
        if in_flight == "abort":
            for request_id in self._scheduler.open_requests():
                self._scheduler.abort(request_id)
        if in_flight in ("abort", "wait"):
            yield Until(lambda: self._scheduler.is_idle)
        deadline = time.monotonic() + SETTLE_S
        yield Until(lambda: self._has_settled or time.monotonic() > deadline)
        if not self._has_settled:
            raise Unavailable("peers may still write to pages of this engine; nothing has changed, try again")
        if in_flight == "retract":
            self._plan(is_paused=True)
            self._scheduler.retract_running()
            yield Until(lambda: not self._scheduler.num_inflight_steps)
        if self._membership.peering is not None:
            self._plan(is_paused=True)  # or what waits would ask peers that do not know yet

    @property
    def _has_settled(self) -> bool:
        """Whether no page belongs to a transfer."""
        return self._membership.is_at_rest and not self._scheduler.load().num_quarantined_pages

    def _plan(self, *, is_paused: bool) -> None:
        """Plan no step, or as many as ever; what else the scheduler has to do goes on."""
        self._scheduler.limits = replace(self._limits, max_inflight_steps=0) if is_paused else self._limits

    def _rejoin(self) -> None:
        """Be another instance to peers: pages of before and after must not meet."""
        if self._membership.peering is None:
            return
        self._membership.leave()
        self._join()

    def _join(self) -> None:
        self._change(peer=self._membership.join(self.info).peer)
        peering = self._membership.peering
        if peering is not None and isinstance(self._scheduler, Scheduler):  # groups have no peers
            self._scheduler.source, self._scheduler.sink = peering.hinge.receiver, peering.hinge.sender

    def _change(self, **fields: object) -> None:
        self.info = msgspec.structs.replace(self.info, **fields)
        self._tell(Changed(self.info))

    # ------------------------------------------------------------------ pauses

    def _pause(self, mode: InFlight) -> Script:
        try:
            if mode != "keep":
                yield from self._settle(mode, PAUSED)
        except DiptychError:
            self.end_pause()
            raise
        self._gate.hold(PAUSED)
        self._plan(is_paused=True)
        self._change(is_paused=True)
        return Outcome("generation is paused")

    def _continue(self) -> Script:
        yield _AT_ONCE
        self.end_pause()
        self._change(is_paused=False)
        return Outcome("generation goes on")

    # ------------------------------------------------------------------ memory

    def _release(self, message: ReleaseMemory) -> Script:
        tags = [tag for tag in message.tags if tag not in self.info.released]
        if not tags:
            return Outcome("it is released already")
        if message.in_flight == "wait" and self.info.is_paused and self._scheduler.open_requests():
            raise Unavailable("paused requests cannot be waited for; POST /continue_generation, or abort them")
        try:
            yield from self._settle(message.in_flight, _asleep(tags))
            self._gate.refuse(_asleep([*self.info.released, *tags]))
            self._membership.leave()
            self._scheduler.flush_cache()
            yield FreeMemory(tags)
        except DiptychError:
            self._wake_if_whole()
            raise
        finally:
            self._plan(is_paused=self.info.is_paused)
            self._gate.let_go(_asleep(tags))
        self._change(released=(*self.info.released, *tags), peer=None)
        logger.info("memory is released: %s", ", ".join(tags))
        return Outcome(f"released: {', '.join(tags)}")

    def _resume(self, tags: list[MemoryTag]) -> Script:
        wanted = [tag for tag in self.info.released if tag in tags]
        if wanted:
            yield RestoreMemory(wanted)
            self._change(released=tuple(tag for tag in self.info.released if tag not in wanted))
            self._wake_if_whole()
            logger.info("memory is resumed: %s", ", ".join(wanted))
        return Outcome(f"resumed: {', '.join(wanted) or 'nothing was released'}")

    def _wake_if_whole(self) -> None:
        if self.info.released:
            self._gate.refuse(_asleep(self.info.released))
            return
        if self._membership.peering is None:
            self._join()
        self._gate.welcome()


def _asleep(tags: tuple[MemoryTag, ...] | list[MemoryTag]) -> str:
    return f"the engine is asleep, {' and '.join(sorted(tags))} released; POST /resume_memory_occupation or /wake_up"
