"""Many small copies as few large ones: pack at the source, one write, scatter at the destination. Pure arithmetic.

Owns the split of a plan into the three steps, and the choice between direct and staged by cost. The kernels that pack
and scatter, and the buffers, are the worker's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diptych.errors import InvariantError
from diptych.transfer.plan import Descriptors


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """What moving bytes costs on one pair of peers; measured, see `diptych doctor`.

    descriptor_s: seconds per descriptor. wire_bytes_per_s: what the transport moves; copy_bytes_per_s: what packing and
    scattering move, each; launch_s: seconds to start one of them.
    """

    descriptor_s: float
    wire_bytes_per_s: float
    copy_bytes_per_s: float
    launch_s: float = 0.0

    def direct_s(self, num_descriptors: int, nbytes: int) -> float:
        """Seconds to write `nbytes` in so many pieces."""
        return num_descriptors * self.descriptor_s + nbytes / self.wire_bytes_per_s

    def staged_s(self, nbytes: int, stage_nbytes: int) -> float:
        """Seconds to pack, write and scatter `nbytes` through buffers of `stage_nbytes`."""
        num_rounds = -(-nbytes // stage_nbytes)
        copies = 2 * (num_rounds * self.launch_s + nbytes / self.copy_bytes_per_s)
        return copies + self.direct_s(num_rounds, nbytes)

    def prefers_staging(self, descriptors: Descriptors, stage_nbytes: int) -> bool:
        """Whether staging is the cheaper way; never without a buffer."""
        if stage_nbytes <= 0 or not len(descriptors):
            return False
        nbytes = descriptors.total_nbytes
        return self.staged_s(nbytes, stage_nbytes) < self.direct_s(len(descriptors), nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class StagedRound:
    """One fill of the staging buffers. pack: from the source; write: buffer to buffer; scatter: to the destination.

    Both ends compute the same round from the same plan, so nothing about it is sent.
    """

    pack: Descriptors
    write: Descriptors
    scatter: Descriptors


def staged_rounds(
    descriptors: Descriptors, src_stage: int, *, dst_stage: int, stage_nbytes: int
) -> Iterator[StagedRound]:
    """The plan in rounds that fit buffers of `stage_nbytes` at addresses `src_stage` and `dst_stage`, in order.

    Raises InvariantError if a single copy is larger than the buffer: such a plan is cheaper direct.
    """
    ends = np.cumsum(descriptors.nbytes)
    if len(ends) and int(descriptors.nbytes.max()) > stage_nbytes:
        raise InvariantError(f"a copy of {descriptors.nbytes.max()} bytes does not fit a buffer of {stage_nbytes}")
    first, sent = 0, 0
    while first < len(ends):
        upto = int(np.searchsorted(ends, sent + stage_nbytes, side="right"))
        nbytes = descriptors.nbytes[first:upto]
        offsets = ends[first:upto] - nbytes - sent
        total = np.array([int(ends[upto - 1]) - sent], dtype=np.int64)
        yield StagedRound(
            pack=Descriptors(descriptors.src[first:upto], src_stage + offsets, nbytes),
            write=Descriptors(np.array([src_stage]), np.array([dst_stage]), total),
            scatter=Descriptors(dst_stage + offsets, descriptors.dst[first:upto], nbytes),
        )
        first, sent = upto, int(ends[upto - 1])
