"""What a prefill engine knows of the rooms that it fills, and of those who read them. Plain state; `sender` changes
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.core.sequence import Sequence
from diptych.errors import DiptychError
from diptych.kv.cache import SequencePages
from diptych.transfer.handoff import Handoff
from diptych.transfer.registrations import Registered
from diptych.transfer.stages import Stages
from diptych.transfer.state import Transfer
from diptych.transfer.wire import TransferInfo


@dataclass(slots=True, eq=False)
class Reader:
    """One destination of one room, and how far it has been served. num_sent_tokens: posted, from the prompt's start."""

    registered: Registered
    info: TransferInfo
    num_sent_tokens: int
    next_chunk: int = 0
    has_all: bool = False


@dataclass(slots=True, eq=False)
class Outgoing:
    """One room that we fill. write_ids: posted and not ended. handoff_slot: our row, from the first token on.

    request_id: of the prompt in this engine, once it is known. sequence, pages: once it is computed in part. group: our
    data-parallel group that computes it. readers: by the rank of ours that was told, and the agent; missing: how many
    more each of our ranks must hear of.
    """

    transfer: Transfer
    deadline: float
    stages: Stages
    request_id: str | None = None
    generation: int = 0
    group: int = 0
    readers: dict[tuple[int, str], Reader] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    sequence: Sequence | None = None
    pages: SequencePages | None = None
    handoff: Handoff | None = None
    handoff_slot: int | None = None
    write_ids: set[int] = field(default_factory=set)
    is_sending: bool = False
    error: DiptychError | None = None

    @property
    def is_joined(self) -> bool:
        """Whether every destination has named itself."""
        return bool(self.readers) and not any(self.missing.values())
