"""What a decode engine says to prefill engines to be written to: who it is, once each, and where a room's KV goes.

Engine thread; knows no rooms but their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from diptych.errors import DiptychError
from diptych.transfer.extension import RoomExtension
from diptych.transfer.peers import Peer
from diptych.transfer.ports import Network, Site
from diptych.transfer.ranks import streams
from diptych.transfer.wire import TransferInfo, encode_registration, encode_transfer_info


class Asking:
    """One decode engine's questions."""

    def __init__(self, site: Site, network: Network) -> None:
        self._site = site
        self._shape = site.shape
        self._network = network
        self._registered_with: set[Peer] = set()

    def info(self, room: int, pages: Sequence[int], slot: int, extension: RoomExtension) -> TransferInfo:
        """Where a room's KV and handoff row go. pages: those after the cached ones."""
        return TransferInfo(
            room=room,
            endpoint=self._site.endpoint,
            port=self._site.port,
            agent_name=self._site.ranks[0].agent_name,
            dst_pages=np.array(pages, dtype=np.int32),
            aux_slot=slot,
            num_readers=1,
            extension=extension,
        )

    def ask(self, peer: Peer, info: TransferInfo) -> None:
        """Name a room to a peer, after who we are if it has not been told, or has not told us who it is."""
        if peer not in self._registered_with or peer.identity is None:
            self.register_with(peer)
        extension = info.extension
        assert isinstance(extension, RoomExtension)
        extension = msgspec.structs.replace(extension, knows_you=peer.identity is not None)
        frames = encode_transfer_info(replace(info, extension=extension))
        self._network.send(peer.address, frames)

    def register_with(self, peer: Peer) -> None:
        """Introduce ourselves; once to each instance, unless it does not answer."""
        self._registered_with.add(peer)
        self._network.send(peer.address, encode_registration(self._site.registration()))

    def forget(self, peer: Peer) -> None:
        """A peer is dead, or may not have heard who we are."""
        self._registered_with.discard(peer)

    def problem_with(self, peer: Peer) -> str:
        """Why a peer that has said who it is cannot fill our pages; empty if it can."""
        try:
            self.streams_from(peer, 0, 0)
        except DiptychError as error:
            return str(error)
        return ""

    def streams_from(self, peer: Peer, room: int, group: int) -> list[tuple[int, int]] | None:
        """(writer of the peer, reader of ours) that must write for a room; None until we know the peer's ranks.

        Raises PeerIncompatible if the peer cannot fill our pages.
        """
        if peer.identity is None:
            return None
        theirs = peer.identity.shape()
        return streams(theirs, self._shape, src_group=theirs.group_of(room), dst_group=group)
