"""Looks at every engine again and again: does it answer, what is it, how busy is it. Feeds `pool`.

One task an engine, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from diptych.router.config import DEFAULT_BOOTSTRAP_PORT, Role, RouterConfig
from diptych.router.member import Member, State
from diptych.router.pool import Pool
from diptych.router.upstream import EngineFailed, ErrorStatus, Upstream

logger = logging.getLogger(__name__)

QUICK_S = 0.25  # between two looks at an engine that is suspect or has not joined yet
REFRESH_S = 5.0  # between two looks at what an engine is: its role can change while it runs
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_UNKNOWN_PATH = (404, 405, 501)
_LOADS = "/v1/loads?include=core,disagg,queues,memory"


class HealthWatch:
    """The tasks that look after a pool. An async context manager."""

    def __init__(self, pool: Pool, upstream: Upstream, config: RouterConfig) -> None:
        self._pool = pool
        self._upstream = upstream
        self._config = config
        self._tasks: dict[asyncio.Task[None], Member] = {}
        self._hurries: dict[Member, asyncio.Event] = {}

    async def __aenter__(self) -> HealthWatch:
        self._pool.on_joined = self._watch
        for member in self._pool:
            self._watch(member)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hurry(self, member: Member) -> None:
        """Look at this engine now: a request has seen something."""
        if member in self._hurries:
            self._hurries[member].set()

    def _watch(self, member: Member) -> None:
        self._hurries[member] = asyncio.Event()
        task = asyncio.create_task(self._look_after(member))
        self._tasks[task] = member
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._hurries[self._tasks.pop(task)]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("bug: the health check of an engine has ended", exc_info=error)

    async def _look_after(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        learned_at = float("-inf")
        hurry = self._hurries[member]
        while self._pool.is_known(member):
            started = loop.time()
            hurry.clear()
            needs_learning = member.state in (State.JOINING, State.DOWN) or started - learned_at > REFRESH_S
            if await self._look(member, learns=needs_learning) and needs_learning:
                learned_at = started
            is_quick = member.state in (State.SUSPECT, State.JOINING)
            pause = max(0.0, started + self._config.health_interval - loop.time())
            await self._pause(hurry, min(pause, QUICK_S) if is_quick else pause)

    async def _pause(self, hurry: asyncio.Event, pause_s: float) -> None:
        """Until `pause_s` have passed; when in a hurry, a moment, so that many failures make few probes."""
        try:
            async with asyncio.timeout(pause_s):
                await hurry.wait()
                await asyncio.sleep(min(pause_s, QUICK_S) / 5)
        except TimeoutError:
            pass

    async def _look(self, member: Member, *, learns: bool) -> bool:
        """Probe once. Returns whether the engine answered all that it was asked."""
        now = asyncio.get_running_loop().time
        timeout_s = self._config.health_timeout
        try:
            await self._upstream.ask("GET", member.url + "/health", timeout_s=timeout_s)
        except ErrorStatus as error:
            if error.status == 503:
                member.note_refused()
                return False
            if error.status >= 500:
                member.note_probe_failed(str(error))
                return False
            # Other servers have no /health, but whoever says 404 is alive.
        except EngineFailed as error:
            if not self._pool.has_fresh_bytes(member):
                member.note_probe_failed(str(error))
            return False
        try:
            if learns:
                await self._learn(member)
            await self._ask_load(member)
        except EngineFailed as error:
            if member.state in (State.JOINING, State.DOWN):
                member.note_probe_failed(str(error))
                return False
            logger.debug("engine %s is slow to say how busy it is: %s", member.url, error)
        member.note_answered(now())
        return True

    async def _learn(self, member: Member) -> None:
        """What the engine is and serves. Raises: EngineFailed."""
        info = await self._ask_first(member, ("/server_info", "/get_server_info"))
        models = await self._ask_first(member, ("/v1/models",))
        mode, port = info.get("disaggregation_mode"), info.get("disaggregation_bootstrap_port")
        member.role = member.address.role or (_ROLES.get(mode, Role.UNIFIED) if isinstance(mode, str) else Role.UNIFIED)
        reported = port if isinstance(port, int) else DEFAULT_BOOTSTRAP_PORT
        member.bootstrap_port = member.address.bootstrap_port or reported
        cards = models.get("data")
        names = [card.get("id") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        member.models = frozenset(name for name in names if isinstance(name, str))

    async def _ask_load(self, member: Member) -> None:
        loads = (await self._ask_first(member, (_LOADS,))).get("loads")
        if not isinstance(loads, list):
            return
        member.loads = [entry for entry in loads if isinstance(entry, dict)]
        member.note_load(sum(_num_requests(entry) for entry in member.loads))

    async def _ask_first(self, member: Member, paths: tuple[str, ...]) -> dict[str, Any]:
        """The JSON object behind the first path that the engine knows; empty if it knows none. Raises: EngineFailed."""
        for path in paths:
            try:
                value = await self._upstream.ask_json(member.url + path, timeout_s=self._config.health_timeout)
            except ErrorStatus as error:
                if error.status in _UNKNOWN_PATH:
                    continue
                raise EngineFailed(f"{path}: {error}") from error
            return value if isinstance(value, dict) else {}
        return {}


def _num_requests(entry: dict[str, Any]) -> float:
    """Requests that one rank reports: running, waiting, and on their way between prefill and decode."""
    queues = entry.get("disaggregation")
    counts = [entry.get("num_running_reqs"), entry.get("num_waiting_reqs")]
    if isinstance(queues, dict):
        counts += [value for name, value in queues.items() if name.endswith("_queue_reqs")]
    return sum(float(count) for count in counts if isinstance(count, int | float))
