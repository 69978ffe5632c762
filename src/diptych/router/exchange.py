"""One attempt at one request: which engines it occupies, since when, and how it is broken off from outside.

Pure book-keeping; the bytes are `relay`'s.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from diptych.router.member import Member


@dataclass(eq=False, kw_only=True)
class Exchange:
    """A request at `target`, whose prompt `prefill` computes if it is not None. Times are of the loop's clock.

    num_new_tokens: of its prompt's num_tokens, that `target` probably lacks. scope: set while its bytes flow; moving it
    into the past ends it.
    """

    target: Member
    prefill: Member | None
    num_tokens: int
    started_at: float
    num_new_tokens: int = 0
    last_byte_at: float = 0.0
    broken_by: str = ""
    scope: asyncio.Timeout | None = None
    _is_prefilling: bool = field(default=False, init=False)

    @property
    def has_bytes(self) -> bool:
        """Whether the engine has sent anything of its answer."""
        return self.last_byte_at > self.started_at

    def open(self) -> None:
        """Count it at its engines."""
        self.last_byte_at = self.started_at
        self._is_prefilling = True
        self.target.num_active += 1
        for member in self._prefilling:
            member.pending_tokens += self.num_tokens
        if self.prefill is not None:
            self.prefill.num_active += 1

    def first_byte(self) -> None:
        """The prompt has been computed: it no longer weighs on anybody."""
        if not self._is_prefilling:
            return
        self._is_prefilling = False
        for member in self._prefilling:
            member.pending_tokens -= self.num_tokens
        if self.prefill is not None:
            self.prefill.num_active -= 1

    def close(self) -> None:
        """It is over, however it went."""
        self.first_byte()
        self.target.num_active -= 1

    def break_off(self, reason: str) -> None:
        """End it from outside: whoever waits for its next byte gets a TimeoutError."""
        if self.scope is not None and not self.broken_by:
            self.broken_by = reason
            self.scope.reschedule(0.0)

    @property
    def _prefilling(self) -> list[Member]:
        return [self.target if self.prefill is None else self.prefill]
