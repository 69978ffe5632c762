"""The engines of a router: who is in, who can take a request, and which one does.

Owns the members, the exchanges open at each, and the picture of their prefix caches. Talks to nobody: `health` feeds
it, `relay` asks it. Lives on the event loop; time comes from it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from diptych.errors import RequestError
from diptych.router.config import EngineAddress, Role, RouterConfig
from diptych.router.exchange import Exchange
from diptych.router.learning import LocalPrefillLearner
from diptych.router.member import Event, Member, State
from diptych.router.policy import POLICIES, Candidate, Draw, choose
from diptych.router.prefixes import BLOCK_TOKENS, PrefixIndex
from diptych.router.prompt import Prompt

# A stream that brought a byte this recently is alive, whatever the engine's /health says.
SILENCE_S = 1.0


class Pair(NamedTuple):
    """The engine that a request goes to, and the one that computes its prompt if that is another; see `Choice`."""

    target: Member
    prefill: Member | None
    num_new_tokens: int


class Pool:
    """Every engine, by URL, in the order they came."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._members: dict[str, Member] = {}
        self._exchanges: dict[Member, set[Exchange]] = {}
        self._prefixes = PrefixIndex()
        self._policy = POLICIES[config.policy]
        self._turn = -1
        self._learner = LocalPrefillLearner()
        self.on_joined: Callable[[Member], None] = lambda member: None
        for address in config.engines:
            self.add(address)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    @property
    def num_active(self) -> int:
        """Requests open at all engines together."""
        return sum(len(exchanges) for exchanges in self._exchanges.values())

    @property
    def has_pair(self) -> bool:
        """Whether a request could take its whole designed way: a unified engine, or prefill and decode, is usable."""
        roles = {member.role for member in self._usable()}
        return Role.UNIFIED in roles or {Role.PREFILL, Role.DECODE} <= roles

    @property
    def is_serving(self) -> bool:
        """Whether requests can be answered, if only by a decode engine whose prefill engines are all gone."""
        if self.has_pair:
            return True
        had_prefill = any(member.role is Role.PREFILL and member.was_usable for member in self)
        return had_prefill and any(member.role is Role.DECODE for member in self._usable())

    def add(self, address: EngineAddress) -> Member:
        """Take an engine in; it joins once it answers. Raises: RequestError if it is there already."""
        known = self._members.get(address.url)
        if known is not None and known.state is not State.REMOVED:
            raise RequestError(f"engine {address.url} is in the pool already; DELETE it first", param="url")
        member = Member(address, self._config, on_change=self._on_change)
        self._members[address.url] = member
        self._exchanges[member] = set()
        self.on_joined(member)
        return member

    def remove(self, url: str) -> Member:
        """Give an engine no more requests, and forget it once it has none. Raises: RequestError if it is not there."""
        member = self._members.get(url)
        if member is None or member.state is State.REMOVED:
            raise RequestError(f"engine {url} is not in the pool; GET /workers lists those that are", param="url")
        member.remove()
        self._prefixes.forget(url)
        self._forget_if_idle(member)
        return member

    def is_known(self, member: Member) -> bool:
        """Whether this member still has to be looked after."""
        return member in self._exchanges

    def has_fresh_bytes(self, member: Member) -> bool:
        """Whether one of its streams brought a byte just now, which shows that it lives."""
        now = _now()
        return any(
            exchange.has_bytes and now - exchange.last_byte_at < SILENCE_S for exchange in self._exchanges[member]
        )

    def targets(self) -> list[Member]:
        """Engines that a client's request can go to, the healthy ones only unless there are none."""
        return self._tier(lambda member: member.role is not Role.PREFILL)

    @contextmanager
    def exchange(self, pair: Pair, num_tokens: int) -> Iterator[Exchange]:
        """A request at its engines, counted as long as the context lasts."""
        target, prefill, num_new = pair
        exchange = Exchange(
            target=target, prefill=prefill, num_tokens=num_tokens, started_at=_now(), num_new_tokens=num_new
        )
        exchanges = self._exchanges.setdefault(target, set())
        exchanges.add(exchange)
        exchange.open()
        try:
            yield exchange
        finally:
            exchange.close()
            exchanges.discard(exchange)
            self._forget_if_idle(target)

    @property
    def local_prefill_tokens(self) -> int:
        """Prompts that lack fewer tokens than this go to a decode engine alone."""
        learned = self._learner.num_tokens if self._config.learn_local_prefill else 0
        return max(self._config.local_prefill_tokens, learned)

    def note_first_event(self, exchange: Exchange, seconds: float) -> None:
        """A stream has begun, so long after its request came: what `learn_local_prefill` learns from."""
        if exchange.target.role is Role.DECODE:
            self._learner.observe(exchange.num_new_tokens, is_local=exchange.prefill is None, seconds=seconds)

    def _threshold(self) -> int:
        """`local_prefill_tokens` for one choice; while it learns, sometimes another."""
        if not self._config.learn_local_prefill:
            return self._config.local_prefill_tokens
        return max(self._config.local_prefill_tokens, self._learner.draw_threshold(random.random()))

    def choose(self, prompt: Prompt, excluded: Collection[Member] = ()) -> Pair | None:
        """Where the request goes.

        None if nobody can take it. Only engines that serve the model are asked, if any is known to.
        """
        targets = _serving_model(self.targets(), prompt.model)
        prefills = _serving_model(self._tier(lambda member: member.role is Role.PREFILL), prompt.model)
        matches = self._prefixes.matches(prompt.blocks)
        num_tokens = max(prompt.num_tokens, 1)

        def candidates(members: Sequence[Member], role: Role) -> list[Candidate]:
            return [
                Candidate(
                    url=member.url,
                    load=member.load,
                    pending_tokens=member.pending_tokens,
                    matched=min(matches.get(member.url, 0) * BLOCK_TOKENS / num_tokens, 1.0),
                )
                for member in members
                if member.role is role and member not in excluded
            ]

        if not excluded:  # a retry is of the same turn
            self._turn += 1
        choice = choose(
            self._policy,
            Draw(self._turn, random.random()),
            unified=candidates(targets, Role.UNIFIED),
            decode=candidates(targets, Role.DECODE),
            prefill=candidates(prefills, Role.PREFILL),
            num_tokens=prompt.num_tokens,
            local_prefill_tokens=self._threshold(),
        )
        if choice is None:
            return None
        for url in filter(None, (choice.target, choice.prefill)):
            self._prefixes.record(prompt.blocks, url)
        prefill = None if choice.prefill is None else self._members[choice.prefill]
        return Pair(self._members[choice.target], prefill, choice.num_new_tokens)

    def forget_prefixes(self) -> None:
        """The engines' caches were emptied."""
        self._prefixes.clear()

    def _usable(self) -> list[Member]:
        return [member for member in self if member.state in (State.HEALTHY, State.SUSPECT)]

    def _tier(self, belongs: Callable[[Member], bool]) -> list[Member]:
        usable = [member for member in self._usable() if belongs(member)]
        return [member for member in usable if member.state is State.HEALTHY] or usable

    def _on_change(self, member: Member, event: Event) -> None:
        if event is not Event.LOST:
            return
        self._prefixes.forget(member.url)
        now = _now()
        for exchange in list(self._exchanges.get(member, ())):
            if not exchange.has_bytes or now - exchange.last_byte_at >= SILENCE_S:
                exchange.break_off(f"the engine stopped answering: {member.last_error}")

    def _forget_if_idle(self, member: Member) -> None:
        if member.state is not State.REMOVED or self._exchanges.get(member):
            return
        self._exchanges.pop(member, None)
        if self._members.get(member.url) is member:
            del self._members[member.url]


def _serving_model(members: list[Member], model: str) -> list[Member]:
    return [member for member in members if model in member.models] or members


def _now() -> float:
    return asyncio.get_running_loop().time()
