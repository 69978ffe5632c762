"""The ranks of an engine as transfers see them: who holds which pages, and which rank writes to which. Pure arithmetic.

One engine has one set of page numbers, which all ranks of a data-parallel group share: a page is spread over them, each
with its layers and KV heads. Knows no addresses and no rooms.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.errors import PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.plan import writers

# The rank whose process has the handoff rows, on either side; they go from there to there.
HANDOFF_RANK = 0


@dataclass(frozen=True, slots=True)
class Ranks:
    """The layouts of an engine's ranks, rank = pp_rank * tp_size + tp_rank.

    dp_size: groups into which attention divides a stage, each with pages of its own. Raises PeerIncompatible if the
    numbers do not go together.
    """

    layouts: tuple[KVLayout, ...]
    tp_size: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        num_ranks = len(self.layouts)
        if not num_ranks or num_ranks % self.tp_size or self.tp_size % self.dp_size:
            raise PeerIncompatible(
                f"{num_ranks} ranks are no engine of tp_size {self.tp_size} and dp_size {self.dp_size}"
            )

    def group_of(self, room: int) -> int:
        """The data-parallel group that fills or reads a room, if nobody names another."""
        return room % self.dp_size

    def members(self, group: int) -> list[int]:
        """The ranks of a data-parallel group, of all stages."""
        size = self.tp_size // self.dp_size
        return [rank for rank in range(len(self.layouts)) if rank % self.tp_size // size == group]


def streams(srcs: Ranks, dsts: Ranks, *, src_group: int = 0, dst_group: int = 0) -> list[tuple[int, int]]:
    """(writer, reader) for each pair of ranks between which KV of one room moves, readers in order.

    Every byte of every reader is in one stream: of ranks that hold the same, one writes. Both ends compute this alone
    and find the same. Raises PeerIncompatible if a reader would not be filled.
    """
    members = srcs.members(src_group)
    held = [srcs.layouts[rank] for rank in members]
    return [
        (members[index], reader)
        for place, reader in enumerate(dsts.members(dst_group))
        for index in sorted(writers(dsts.layouts[reader], place, held))
    ]
