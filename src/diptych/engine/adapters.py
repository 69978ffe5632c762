"""The adapters of one engine by name: which are loaded, which requests use them, and the scripts that change that.

An adapter's number is new with every load, so that neither slots nor cached pages of one are ever taken for those of
another that had its name before. Engine thread; never imports torch.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import msgspec

from diptych.core.calls import AdapterFacts, AdapterIsRead, LoadAdapter, ReadAdapter, UnloadAdapter, WorkerCall
from diptych.core.messages import AdapterInfo, AdapterMessage, AddAdapter, RemoveAdapter, RequestFailed, RequestOutput
from diptych.core.request import Request
from diptych.engine.administration import Outcome, Script, Until
from diptych.errors import AdapterError, DiptychError, PeerIncompatible, UnknownModel
from diptych.scheduler.groups import AnyScheduler

logger = logging.getLogger(__name__)

_READING_POLL_S = 0.02


@dataclass(slots=True)
class _Adapter:
    """One adapter. info: None until it is loaded. num_open: unanswered requests that use it."""

    adapter_id: int
    info: AdapterInfo | None = None
    is_leaving: bool = False
    num_open: int = 0


class Adapters:
    """Adapters over one scheduler.

    Args: max_loras: that one step may use.
    """

    def __init__(self, scheduler: AnyScheduler, max_loras: int) -> None:
        self._scheduler = scheduler
        self._max_loras = max_loras
        self._ids = itertools.count(1)
        self._by_name: dict[str, _Adapter] = {}
        self._users: dict[str, _Adapter] = {}  # by request

    def loaded(self) -> list[AdapterInfo]:
        """Those that requests may name, in the order of loading."""
        return [each.info for each in self._by_name.values() if each.info is not None and not each.is_leaving]

    def admit(self, request: Request) -> None:
        """Have a request scheduled, with its adapter's number and digest.

        Raises: UnknownModel naming the adapters that there are; PeerIncompatible if a peer's request is for another
        one, or one that is not here; what the scheduler refuses it with.
        """
        if not request.adapter:
            self._scheduler.add(request)
            return
        info = self._info_for(request)
        adapter = self._by_name[request.adapter]
        resolved = msgspec.structs.replace(request, adapter_id=adapter.adapter_id, adapter_digest=info.digest)
        self._scheduler.add(resolved)
        self._users[request.request_id] = adapter
        adapter.num_open += 1

    def note_answers(self, answers: Iterable[RequestOutput | RequestFailed]) -> None:
        """Count those that end their requests."""
        if not self._users:
            return
        for answer in answers:
            is_last = isinstance(answer, RequestFailed) or answer.finish_reason is not None
            if is_last and (adapter := self._users.pop(answer.request_id, None)) is not None:
                adapter.num_open -= 1

    def script(self, message: AdapterMessage) -> Script:
        """What a message of the server asks for."""
        return self._load(message) if isinstance(message, AddAdapter) else self._unload(message)

    def _load(self, message: AddAdapter) -> Script:
        """Load an adapter; on failure all is as it was. Ends with the msgpack list of all that are loaded."""
        self._check_new(message)
        adapter = self._by_name[message.name] = _Adapter(next(self._ids))
        try:
            facts = yield from self._read(adapter.adapter_id, message.path)
        except DiptychError:
            del self._by_name[message.name]
            yield UnloadAdapter(adapter.adapter_id)  # ranks that could read it forget it
            raise
        if message.pinned:
            self._scheduler.adapters.pin(adapter.adapter_id)
        adapter.info = AdapterInfo(message.name, message.path, facts.digest, facts.rank, message.pinned)
        logger.info("adapter %s is loaded: rank %d, %s", message.name, facts.rank, facts.digest)
        return self._outcome(f"adapter {message.name!r} is loaded")

    def _unload(self, message: RemoveAdapter) -> Script:
        """Take no new requests for an adapter, wait for the running ones, and forget it."""
        self._find(message.name)
        adapter = self._by_name[message.name]
        adapter.is_leaving = True
        yield Until(lambda: not adapter.num_open and not self._scheduler.adapters.num_users(adapter.adapter_id))
        self._scheduler.adapters.forget(adapter.adapter_id)
        yield UnloadAdapter(adapter.adapter_id)
        del self._by_name[message.name]
        logger.info("adapter %s is unloaded", message.name)
        return self._outcome(f"adapter {message.name!r} is unloaded")

    def _read(self, adapter_id: int, path: str) -> Generator[WorkerCall | Until, bytes, AdapterFacts]:
        """Read it while steps go on; an idle engine waits for it at once."""
        yield ReadAdapter(adapter_id, path)
        while not self._scheduler.is_idle and not msgspec.msgpack.decode((yield AdapterIsRead(adapter_id)), type=bool):
            yield Until(_has_passed(time.monotonic() + _READING_POLL_S))
        return msgspec.msgpack.decode((yield LoadAdapter(adapter_id)), type=AdapterFacts)

    def _check_new(self, message: AddAdapter) -> None:
        name = message.name
        if not name or not name.isprintable():
            raise AdapterError(f"an adapter needs a printable name, got {name!r}", param="lora_name")
        known = self._by_name.get(name)
        if known is not None:
            raise AdapterError(f"adapter {name!r} is {_state(known)}", param="lora_name")
        num_pinned = sum(info.pinned for info in self.loaded())
        if message.pinned and num_pinned + 1 >= self._max_loras:
            raise AdapterError(
                f"{num_pinned} adapters are pinned already, and of --max-loras {self._max_loras} one must stay free",
                param="pinned",
            )

    def _info_for(self, request: Request) -> AdapterInfo:
        asked = request.adapter_digest
        try:
            info = self._find(request.adapter)
        except UnknownModel as error:
            if asked:
                raise PeerIncompatible(f"the prefill engine lacks what decode has ({asked}): {error}") from None
            raise
        if asked not in ("", info.digest):
            raise PeerIncompatible(
                f"adapter {info.name!r} is {info.digest} at the prefill engine and {asked} at decode; load the same"
            )
        return info

    def _find(self, name: str) -> AdapterInfo:
        adapter = self._by_name.get(name)
        if adapter is None or adapter.info is None or adapter.is_leaving:
            names = ", ".join(repr(info.name) for info in self.loaded()) or "none"
            state = "is being unloaded" if adapter is not None and adapter.is_leaving else "is not loaded"
            raise UnknownModel(f"adapter {name!r} {state}; loaded are: {names}", param="lora_path")
        return adapter.info

    def _outcome(self, message: str) -> Outcome:
        return Outcome(message, msgspec.msgpack.encode(self.loaded()))


def _state(adapter: _Adapter) -> str:
    """What is the matter with a name that is taken, and what to do."""
    if adapter.is_leaving:
        return "being unloaded: its last requests are running; wait for them, or abort them"
    return "being loaded already; wait for it" if adapter.info is None else "loaded already; unload it first"


def _has_passed(deadline: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= deadline
