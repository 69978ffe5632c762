"""The transfer backend over NIXL and UCX: what moves KV between real processes. The only module that imports NIXL.

One agent, used from one thread: NIXL's default is no locking at all. No progress thread: the owner polls, and that is
what moves things on. UCX is configured through NIXL's own option, so nothing is written to the environment; a `UCX_*`
variable that the user has set wins.
"""

from __future__ import annotations

import importlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.errors import ConfigError, PeerIncompatible, PeerLost, TransferError, TransferRejected
from diptych.transfer.backend import MemoryKind, MemoryRegion, Write, WriteResult
from diptych.transfer.metadata_probe import name_in, serve
from diptych.transfer.ucx import carrier, tcp_bytes_sent

logger = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu13", "nixl_cu12")
# Keepalive finds a peer that vanished without closing its connections; UCX's own default is 20 s.
_UCX_OPTIONS = {"KEEPALIVE_INTERVAL": "1s"}
# Between two GPU processes these cut the cost of a descriptor from 10 to 6.5 us. Between host memories the threshold
# alone sends everything over TCP, at a tenth of the speed: it must not be set there.
_UCX_VRAM_OPTIONS = {"RNDV_SCHEME": "put_zcopy", "RNDV_THRESH": "0"}
# A write of at least so many bytes tells which transport carried it.
_TELLING_NBYTES = 2**18


class NixlHandle(Protocol):
    """What we use of nixl_xfer_handle."""

    def release(self) -> None: ...


class NixlAgent(Protocol):
    """What we use of nixl_agent, version 1.5."""

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None: ...
    def register_memory(self, reg_list: NDArray[np.uint64], mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object: ...
    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str, notif_msg: bytes
    ) -> NixlHandle: ...
    def transfer(self, handle: NixlHandle) -> str: ...
    def check_xfer_state(self, handle: NixlHandle) -> str: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None: ...


@dataclass(slots=True)
class _Posted:
    """One that was posted and has not ended. tcp_nbytes: `tcp_bytes_sent` before it; None if not to be measured."""

    peer: str
    handle: NixlHandle
    nbytes: int
    kind: MemoryKind
    tcp_nbytes: int | None


class NixlBackend:
    """A NIXL agent over UCX; see `TransferBackend` for what each method promises.

    kind: of the memory that will mostly be sent. agent: NIXL's own, for benchmarks of it alone. Raises ConfigError if
    NIXL is not installed or UCX cannot start.
    """

    def __init__(self, name: str, *, kind: MemoryKind = MemoryKind.DRAM) -> None:
        nixl = _load()
        options = _UCX_OPTIONS | (_UCX_VRAM_OPTIONS if kind is MemoryKind.VRAM else {})
        self.name = name
        self._errors = _error_types(nixl)
        self.agent = _start(nixl, name, ",".join(f"{key}={value}" for key, value in options.items()))
        self._registrations: list[object] = []
        self._peers: dict[str, bytes] = {}
        self._transports: dict[str, str] = {}
        self._open: dict[int, _Posted] = {}
        self._ended: list[WriteResult] = []
        self._inbox: list[tuple[str, bytes]] = []
        self._unreleased: list[NixlHandle] = []
        self._num_writes = 0
        self._is_closed = False

    @property
    def num_open_writes(self) -> int:
        """Handles of NIXL that are held: writes that have not ended, or whose handle NIXL would not release yet."""
        return len(self._open) + len(self._unreleased)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Pin and register `regions`; takes about as long as touching them."""
        for kind in MemoryKind:
            rows = [
                (region.address, region.nbytes, region.space.device) for region in regions if region.space.kind is kind
            ]
            if rows:
                with self._translated(f"registering {len(rows)} {kind} regions"):
                    table = np.array(rows, dtype=np.uint64)
                    self._registrations.append(self.agent.register_memory(table, kind.upper()))

    def metadata(self) -> bytes:
        """UCX address and memory keys of this agent."""
        return self.agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata; sets up the connection, but waits for nothing.

        What comes from a socket must have passed a `MetadataProbe`: UCX aborts the process on some that were tampered
        with, and NIXL keeps half of others, so that it refuses the right ones later.
        """
        name = name_in(metadata)
        if self._peers.get(name) == metadata:
            return name
        # NIXL forgets a peer whose name comes with metadata that it cannot load, so it must not see them.
        if name in self._peers or name == self.name:
            raise PeerIncompatible(f"an agent named {name!r} is known with other metadata; remove it first")
        try:
            with self._translated(f"{len(metadata)} bytes of a peer's metadata"):
                name = self.agent.add_remote_agent(metadata).decode()
        except (TransferError, UnicodeDecodeError) as error:
            raise PeerIncompatible(f"a peer's metadata cannot be used: {error}") from error
        self._peers[name] = metadata
        return name

    def remove_peer(self, peer: str) -> None:
        """Invalidate a peer. Its unfinished writes are released: what UCX had sent already may still land."""
        for handle in [handle for handle, write in self._open.items() if write.peer == peer]:
            self._end(handle, PeerLost(f"peer {peer} was removed before the write ended"))
        self._transports.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._invalidate(peer)

    def write(self, write: Write) -> int:
        """Post a WRITE. Between host memories of one machine the bytes are copied before this returns."""
        self._num_writes += 1
        number = self._num_writes
        try:
            if len(write.descriptors):
                self._post(number, write)
            else:
                self.notify(write.peer, write.notification)
                self._ended.append(WriteResult(number))
        except TransferError as error:
            self._end(number, error)
        return number

    def poll(self) -> list[WriteResult]:
        """Ask NIXL about every unfinished write."""
        self._unreleased = [handle for handle in self._unreleased if not self._released(handle)]
        self._inbox += self._fetched()
        for number, write in list(self._open.items()):
            try:
                with self._translated(f"a write of {write.nbytes} bytes to {write.peer}"):
                    self._settle(number, write, self.agent.check_xfer_state(write.handle))
            except TransferError as error:
                self._end(number, error)
        ended, self._ended = self._ended, []
        return ended

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification alone."""
        if peer not in self._peers:
            raise PeerLost(f"agent {self.name} knows no peer {peer!r}")
        with self._translated(f"a notification to {peer}"):
            self.agent.send_notif(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Notifications of all peers, known here or not."""
        arrived, self._inbox = self._inbox + self._fetched(), []
        return arrived

    def transport(self, peer: str) -> str:
        """As measured on the first write of 256 KiB or more; see `diptych.transfer.ucx` for how."""
        return self._transports.get(peer, "unknown")

    def close(self) -> None:
        """Release handles, peers and memory, and end the agent, which closes its connections."""
        if self._is_closed:
            return
        self._is_closed = True
        for peer in list(self._peers):
            self.remove_peer(peer)
        for handle in self._unreleased:
            self._released(handle)
        for registration in self._registrations:
            try:
                with self._translated("deregistering memory"):
                    self.agent.deregister_memory(registration)
            except TransferError as error:
                logger.warning("%s", error)
        del self.agent

    def _invalidate(self, peer: str) -> None:
        try:
            with self._translated(f"removing peer {peer}"):
                self.agent.remove_remote_agent(peer)
        except TransferError as error:
            logger.debug("%s", error)

    def _fetched(self) -> list[tuple[str, bytes]]:
        """What NIXL has received; asking is also what moves connections and bare notifications on."""
        try:
            with self._translated("reading notifications"):
                return [(peer, message) for peer, news in self.agent.get_new_notifs().items() for message in news]
        except (TransferError, UnicodeDecodeError) as error:
            logger.warning("notifications were lost: %s", error)
            return []

    def _post(self, number: int, write: Write) -> None:
        """Hand the descriptors to NIXL as two arrays: 0.1 ms for 1,000; prepared lists would save two thirds of it."""
        peer, descriptors, source, destination = write.peer, write.descriptors, write.source, write.destination
        if peer not in self._peers:
            raise PeerLost(f"agent {self.name} knows no peer {peer!r}")
        nbytes = descriptors.total_nbytes
        measured = nbytes >= _TELLING_NBYTES and peer not in self._transports
        with self._translated(f"a write of {nbytes} bytes to {peer}"):
            local = self.agent.get_xfer_descs(descriptors.src_rows(source.device), source.kind.upper())
            remote = self.agent.get_xfer_descs(descriptors.dst_rows(destination.device), destination.kind.upper())
            handle = self.agent.initialize_xfer("WRITE", local, remote, peer, write.notification)
            posted = _Posted(peer, handle, nbytes, destination.kind, tcp_bytes_sent() if measured else None)
            self._open[number] = posted
            self._settle(number, posted, self.agent.transfer(handle))

    def _settle(self, number: int, write: _Posted, state: str) -> None:
        """Act on what NIXL said about a write."""
        if state == "DONE":
            if write.tcp_nbytes is not None:
                found = carrier(write.kind, write.nbytes, tcp_bytes_sent() - write.tcp_nbytes)
                self._transports.setdefault(write.peer, found)
            self._end(number, None)
        elif state != "PROC":
            self._end(
                number, TransferError(f"NIXL reports {state} for a write of {write.nbytes} bytes to {write.peer}")
            )

    def _end(self, number: int, error: TransferError | None) -> None:
        """Report a write once, and release its handle once."""
        write = self._open.pop(number, None)
        if write is not None and not self._released(write.handle):
            self._unreleased.append(write.handle)
        self._ended.append(WriteResult(number, error))

    def _released(self, handle: NixlHandle) -> bool:
        try:
            with self._translated("releasing a handle"):
                handle.release()
        except TransferError:
            return False
        return True

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turn NIXL's exceptions into ours."""
        try:
            yield
        except tuple(self._errors) as error:
            kind = self._errors[type(error)]
            raise kind(f"{what}: {error}") from error


def meet(metadata: bytes) -> None:
    """Make an agent, load a peer's metadata, and end: for `ucx.lanes_to`, which reads what UCX logs meanwhile."""
    backend = NixlBackend("diptych-lanes")
    backend.add_peer(metadata)
    backend.close()


def serve_probe() -> None:
    """The child process of `MetadataProbe`: an agent for each peer's metadata, for as long as that does not kill it.

    UCX logs how it reaches a peer only if no earlier one of the same agent was reached in the same way.
    """

    def prepare() -> Callable[[bytes], None]:
        backend = NixlBackend(f"diptych-probe-{uuid.uuid4()}")

        def load(metadata: bytes) -> None:
            backend.add_peer(metadata)
            backend.close()

        return load

    serve(prepare)


def _load() -> ModuleType:
    """The installed NIXL wheel; there are two, for CUDA 13 and 12, and either runs without a GPU."""
    raise_exceptions = logging.raiseExceptions
    for package in _PACKAGES:
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise ConfigError(f"{package} is installed, but cannot be imported: {error}") from error
            continue
        # On import NIXL sends its log to stdout and silences the errors of all logging; both are ours to decide.
        logging.raiseExceptions = raise_exceptions
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.propagate = True
        theirs.setLevel(logging.WARNING)
        return module
    raise ConfigError("NIXL is not installed; run `pip install 'diptych[nixl]'`, or serve with --role unified")


def _start(nixl: ModuleType, name: str, ucx_options: str) -> NixlAgent:
    """A NIXL agent with UCX. Raises ConfigError if that cannot be had."""
    try:
        agent: NixlAgent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"engine_config": ucx_options})
    except tuple(_error_types(nixl)) as error:
        raise ConfigError(f"NIXL's UCX backend does not start: {error}; NIXL_LOG_LEVEL=DEBUG tells more") from error
    return agent


def _error_types(nixl: ModuleType) -> dict[type[Exception], type[TransferError]]:
    """NIXL's exceptions, which have no common root, and what each means to us."""
    bindings = importlib.import_module(f"{nixl.__name__}._bindings")
    return {
        bindings.nixlBackendError: TransferError,
        bindings.nixlCancelledError: TransferError,
        bindings.nixlInvalidParamError: TransferRejected,
        bindings.nixlMismatchError: TransferRejected,
        bindings.nixlNotAllowedError: TransferRejected,
        bindings.nixlNotFoundError: TransferRejected,
        bindings.nixlNotPostedError: TransferError,
        bindings.nixlNotSupportedError: TransferRejected,
        bindings.nixlRemoteDisconnectError: PeerLost,
        bindings.nixlRepostActiveError: TransferError,
        bindings.nixlUnknownError: TransferError,
    }
