"""What the routes of one router share."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.errors import Overloaded, Unavailable
from diptych.router.config import RouterConfig
from diptych.router.health import HealthWatch
from diptych.router.metrics import RouterMetrics
from diptych.router.pool import Pool
from diptych.router.upstream import Upstream


@dataclass
class RouterState:
    """One router. num_open: requests that clients wait for."""

    config: RouterConfig
    pool: Pool = field(init=False)
    upstream: Upstream = field(init=False)
    watch: HealthWatch = field(init=False)
    metrics: RouterMetrics = field(init=False)
    is_draining: bool = False
    num_open: int = 0

    def __post_init__(self) -> None:
        self.pool = Pool(self.config)
        self.upstream = Upstream(self.config)
        self.watch = HealthWatch(self.pool, self.upstream, self.config)
        self.metrics = RouterMetrics(self.pool)

    async def __aenter__(self) -> RouterState:
        await self.upstream.__aenter__()
        await self.watch.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watch.__aexit__()
        await self.upstream.__aexit__()

    def admit(self) -> None:
        """Let one more request in. Raises: Unavailable while draining, Overloaded if there are too many."""
        if self.is_draining:
            self.metrics.note_refused("draining")
            raise Unavailable("the router is shutting down")
        if self.num_open >= self.config.max_active_requests:
            self.metrics.note_refused("overloaded")
            raise Overloaded(f"{self.num_open} requests are open, as many as the router takes (--max-active-requests)")
