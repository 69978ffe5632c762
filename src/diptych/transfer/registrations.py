"""Who has registered with a prefill engine: which memories our ranks may write to, and whether their agents have met.

Refuses whom nothing can be sent to, with both values named. Engine thread; knows no rooms.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from diptych.errors import PeerIncompatible, TransferError
from diptych.transfer.control import HelloReply
from diptych.transfer.destination import Destination, destination_of
from diptych.transfer.extension import PeerExtension
from diptych.transfer.peers import Peer, PeerBook, PeerState
from diptych.transfer.ports import Site
from diptych.transfer.wire import Registration

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Registered:
    """Who may be written to. missing: pairs of agents, ours by rank, that have not met yet. peer: None for one without
    our extension. may_write: whether it knows what would prove our death; an engine of one rank is dead with its port.
    """

    agent_name: str
    rank: int
    destination: Destination
    peer: Peer | None
    missing: set[tuple[int, str]]
    may_write: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether writes can be posted."""
        return self.may_write and not self.missing


class Registrations:
    """Everybody, by the rank of ours that they addressed and the name of their agent."""

    def __init__(self, site: Site, peers: PeerBook) -> None:
        self._site = site
        self._peers = peers
        self._registered: dict[tuple[int, str], Registered] = {}
        self._met: dict[tuple[int, str], bool] = {}  # False: asked for

    def register(self, message: Registration, now: float, *, rank: int) -> None:
        """Somebody introduces himself: meet him, or refuse him with both values named."""
        extension, address = message.extension, f"{message.endpoint}:{message.port}"
        peer = None
        if isinstance(extension, PeerExtension):
            rank = 0  # engines of ours speak to each other as a whole
            peer = self._peers.meet(address, extension.instance_id, now)
            if peer.state is PeerState.GONE:
                return
            peer.identity = extension
            self._peers.heard(peer, now)
        try:
            destination = destination_of(message, self._site.identity, handoff=self._site.handoff_layout, rank=rank)
        except PeerIncompatible as error:
            text = f"decode engine {address} is refused: {error}"
            self._peers.complaints.say("refused", address, text, level=logging.ERROR)
            self._reply(peer, str(error))
            return
        if (rank, message.agent_name) not in self._registered:  # ours repeat themselves until they are answered
            self._add(message.agent_name, rank, destination, peer)
        self._reply(peer, "")

    def find(self, agent_name: str, rank: int) -> Registered | None:
        """Who has registered so with this rank of ours; an engine of ours is found wherever it speaks."""
        whole = self._registered.get((0, agent_name))
        return whole if whole is not None and whole.peer is not None else self._registered.get((rank, agent_name))

    def met(self, key: str, rank: int) -> list[Registered]:
        """Two agents have met: who was waiting for them."""
        pair = (rank, key)
        if pair not in self._met:
            return []
        self._met[pair] = True
        waiting = [registered for registered in self._registered.values() if pair in registered.missing]
        for registered in waiting:
            registered.missing.discard(pair)
        return waiting

    def refused(self, key: str, error: TransferError, *, rank: int) -> list[Registered]:
        """Two agents cannot meet: who can therefore not be written to, and is forgotten.

        Nobody is refused for good: he registers anew for his next room, and what was in the way may have passed.
        """
        pair = (rank, key)
        self._met.pop(pair, None)
        found = [(name, one) for name, one in self._registered.items() if pair in one.destination.pairs]
        for name, registered in found:
            del self._registered[name]
            address = "" if registered.peer is None else registered.peer.address
            text = f"decode agent {key} cannot be met by rank {rank}: {error}"
            self._peers.complaints.say("unmet", address, text, level=logging.ERROR)
        return [registered for _, registered in found]

    def forget(self, peer: Peer) -> None:
        """A peer is dead."""
        for name, registered in list(self._registered.items()):
            if registered.peer is peer:
                del self._registered[name]
                for rank, agent in registered.destination.pairs:
                    self._met.pop((rank, agent), None)
                    self._site.agents[rank].remove_peer(agent)

    def greet(self, peer: Peer | None) -> None:
        """Say who we are."""
        self._reply(peer, "")

    def _add(self, agent_name: str, rank: int, destination: Destination, peer: Peer | None) -> None:
        pairs = destination.pairs
        missing = {pair for pair in pairs if not self._met.get(pair)}
        may_write = peer is None or not self._site.identity.lifelines
        self._registered[rank, agent_name] = Registered(agent_name, rank, destination, peer, missing, may_write)
        self._ask(destination, missing)

    def _ask(self, destination: Destination, missing: Iterable[tuple[int, str]]) -> None:
        for rank, agent in sorted(missing):
            if (rank, agent) not in self._met:
                self._met[rank, agent] = False
                self._site.agents[rank].add_peer(agent, destination.agents[agent])

    def _reply(self, peer: Peer | None, refusal: str) -> None:
        if peer is not None:
            self._peers.send(peer, HelloReply(self._site.identity, refusal))
