"""What a decode engine knows of the rooms that peers fill for it. Plain state; `receiver` changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.core.sequence import Sequence
from diptych.errors import DiptychError, TransferError, error_of_kind
from diptych.transfer.control import Failed
from diptych.transfer.landing import Landing
from diptych.transfer.peers import Peer
from diptych.transfer.stages import Stages
from diptych.transfer.state import Transfer
from diptych.transfer.wire import TransferInfo


@dataclass(slots=True, eq=False)
class Incoming:
    """One room that a peer fills for us.

    info: repeated until the peer has answered, and now and then afterwards. group: our data-parallel group that decodes
    it. is_joined: the peer has answered. is_quiesced: it says that no more comes. kept_pages: in quarantine, once the
    sequence went on without them. is_told: the scheduler has been given the first token.
    """

    transfer: Transfer
    sequence: Sequence
    peer: Peer
    handoff_slot: int
    generation: int
    landing: Landing
    info: TransferInfo
    deadline: float
    next_nudge: float
    stages: Stages
    group: int = 0
    is_joined: bool = False
    is_quiesced: bool = False
    kept_pages: list[int] = field(default_factory=list)
    is_told: bool = False

    @property
    def room(self) -> int:
        """Its number."""
        return self.transfer.room


def error_of(message: Failed) -> DiptychError:
    """The peer's error as one of ours; an unknown kind is a TransferError."""
    error = error_of_kind(message.kind, message.message, message.param)
    return TransferError(message.message) if type(error) is DiptychError else error
