"""Asks registries where a prefill engine listens; answers are kept for a moment, so that a request rarely waits.

The one place of the server that knows its HTTP client. What a registry sends is checked before it is believed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import aiohttp
import msgspec
from msgspec import Meta

from diptych.errors import PeerLost

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
FRESH_S = 1.0  # an answer is used as it is, and then the registry is asked again, before anybody needs to wait for it
STALE_S = 3.0  # it is used if the registry has not answered again meanwhile
USED_S = 60.0  # a registry that nobody named for so long is not asked again
MISSED_S = 0.25  # a failure is not tried again
MAX_ENTRIES = 256
_MAX_ANSWER_NBYTES = 64 * 1024

Word = Annotated[str, Meta(max_length=256)]
Answer = TypeVar("Answer", bound=msgspec.Struct)


class RankRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank listens, as its registry tells. instance_id: empty for an engine that is not ours."""

    rank_ip: Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.:_-]+$")]
    rank_port: Annotated[int, Meta(ge=1, le=65535)]
    instance_id: Word = ""

    @property
    def address(self) -> str:
        """Its control socket as "host:port"."""
        return f"{self.rank_ip}:{self.rank_port}"


class PrefillSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill engine as a whole, as its registry tells; what an engine that is not ours leaves out is None."""

    prefill_tp_size: int
    prefill_dp_size: int
    prefill_pp_size: int = 1
    instance_id: Word = ""
    protocol_version: int | None = None
    fingerprint: Word = ""
    architecture: Word | None = None
    dtype: Word | None = None
    page_size: int | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_latent: bool = False


async def ask_registry(
    session: aiohttp.ClientSession, host: str, port: int, *, rank: int, group: int, kind: type[Answer]
) -> Answer:
    """One question. Raises: PeerLost, saying why there is no answer."""
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}/route"
    where = f"prefill registry {shown}:{port}"
    query = {"engine_rank": str(rank), "target_dp_group": str(group)}
    try:
        async with asyncio.timeout(TIMEOUT_S), session.get(url, params=query, allow_redirects=False) as response:
            status, text = response.status, await response.content.read(_MAX_ANSWER_NBYTES)
    except TimeoutError:
        raise PeerLost(f"{where} does not answer within {TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise PeerLost(f"{where} cannot be reached: {error}") from None
    if status != 200:
        why = {503: "says that its engine is not ready", 404: "knows no such rank"}.get(status, f"answers {status}")
        raise PeerLost(f"{where} {why}")
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise PeerLost(f"{where} does not answer as a registry: {error}") from None


def open_session() -> aiohttp.ClientSession:
    """An HTTP client for registries, to be closed by the caller."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


@dataclass(eq=False)
class _Entry:
    """What is known of one registry. answer: None before the first; a text is why there is none. used_at: by a request.
    lookup: under way. next_lookup: due once the answer is no longer fresh.
    """

    answer: RankRoute | str | None = None
    answered_at: float = float("-inf")
    used_at: float = float("-inf")
    lookup: asyncio.Task[None] | None = None
    next_lookup: asyncio.TimerHandle | None = None

    def is_older_than(self, seconds: float, now: float) -> bool:
        return now - self.answered_at > seconds

    @property
    def is_unused(self) -> bool:
        """Whether no request has named it for a while."""
        return self.answered_at - self.used_at > USED_S

    def forget_next_lookup(self) -> None:
        """There is one under way, or nobody wants it any more."""
        if self.next_lookup is not None:
            self.next_lookup.cancel()
            self.next_lookup = None


@dataclass(eq=False)
class RegistryClient:
    """Registries by host and port; one question at a time to each. Lives on the event loop."""

    _entries: dict[tuple[str, int], _Entry] = field(default_factory=dict)
    _session: aiohttp.ClientSession | None = None

    async def find(self, host: str, port: int) -> RankRoute:
        """Where the engine of this registry listens. Raises: PeerLost if that cannot be learned."""
        entry = self._entry(host, port)
        now = entry.used_at = _now()
        is_missed = isinstance(entry.answer, str)
        if entry.lookup is None and entry.is_older_than(MISSED_S if is_missed else FRESH_S, now):
            self._start_lookup(entry, host, port)
        if entry.lookup is not None and (not isinstance(entry.answer, RankRoute) or entry.is_older_than(STALE_S, now)):
            await asyncio.shield(entry.lookup)
        if isinstance(entry.answer, RankRoute):
            return entry.answer
        raise PeerLost(entry.answer or f"prefill registry {host}:{port} was not asked")

    async def close(self) -> None:
        """Give up open questions and close connections."""
        for entry in self._entries.values():
            entry.forget_next_lookup()
        lookups = [entry.lookup for entry in self._entries.values() if entry.lookup is not None]
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _entry(self, host: str, port: int) -> _Entry:
        entry = self._entries.get((host, port))
        if entry is None:
            entry = self._entries[host, port] = _Entry()
            if len(self._entries) > MAX_ENTRIES:
                self._forget_one()
        return entry

    def _forget_one(self) -> None:
        oldest = next((key for key, entry in self._entries.items() if entry.lookup is None), None)
        if oldest is not None:
            self._entries.pop(oldest).forget_next_lookup()

    def _start_lookup(self, entry: _Entry, host: str, port: int) -> None:
        entry.forget_next_lookup()
        entry.lookup = asyncio.create_task(self._look_up(entry, host, port))

    async def _look_up(self, entry: _Entry, host: str, port: int) -> None:
        if self._session is None:
            self._session = open_session()
        answer: RankRoute | str
        try:
            answer = await ask_registry(self._session, host, port, rank=0, group=0, kind=RankRoute)
        except PeerLost as error:
            answer = str(error)
        self._note(entry, answer)
        entry.answer, entry.answered_at, entry.lookup = answer, _now(), None
        if isinstance(answer, RankRoute) and not entry.is_unused:
            loop = asyncio.get_running_loop()
            entry.next_lookup = loop.call_later(FRESH_S, self._start_lookup, entry, host, port)

    def _note(self, entry: _Entry, answer: RankRoute | str) -> None:
        """Log what has changed, once."""
        if isinstance(answer, str):
            if not isinstance(entry.answer, str):
                logger.warning("%s", answer)
        elif entry.answer != answer:
            logger.info("prefill engine %s at %s", answer.instance_id or "of another make", answer.address)


def _now() -> float:
    return asyncio.get_running_loop().time()
