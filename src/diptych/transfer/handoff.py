"""The handoff state (aux): what decode needs besides KV to continue where prefill stopped. Rows in host memory.

Owns the layout of six buffers, their slots, and packing and unpacking of one row. Order and base columns are the base
format's; what our extension adds lies in columns that a base reader skips, and is zero for a base peer:

    0  output_ids                  int32[16]    token; [1] cached tokens, [2] rank, [3] number of top logprobs,
                                                [4] flags, [15] version
    1  output_token_logprobs_val   f32[16]      logprob of the token
    2  output_token_logprobs_idx   int32[16]    token again
    3  output_top_logprobs_val     f32[K]       likeliest first
    4  output_top_logprobs_idx     int32[K]
    5  output_hidden_states        [hidden]     last hidden state, in the model's dtype (speculative decoding)

Knows no tensors, no requests, no NIXL; memory is whatever writable buffer it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from diptych.core.batch import TokenLogprobs
from diptych.errors import InvariantError
from diptych.transfer.plan import Descriptors

MIN_ROW_NBYTES = 64
NUM_COLUMNS = 16
NUM_BUFFERS = 6
HANDOFF_VERSION = 1

TOKEN, CACHED_TOKENS, RANK, NUM_TOP, FLAGS, VERSION = 0, 1, 2, 3, 4, 15
HAS_LOGPROB = 1
HAS_HIDDEN = 2

IDS, LOGPROB, LOGPROB_ID, TOP, TOP_ID, HIDDEN = range(NUM_BUFFERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLayout:
    """Six buffers, one after the other, each `[num_slots, row]`.

    num_top_logprobs: K. hidden_nbytes: bytes of one hidden state, 0 for none.
    """

    num_slots: int
    num_top_logprobs: int
    hidden_nbytes: int

    @property
    def content_nbytes(self) -> tuple[int, ...]:
        """Bytes that mean something in one row of each buffer."""
        return (NUM_COLUMNS * 4,) * 3 + (self.num_top_logprobs * 4,) * 2 + (self.hidden_nbytes,)

    @property
    def row_nbytes(self) -> tuple[int, ...]:
        """Bytes of one row of each buffer."""
        return tuple(max(MIN_ROW_NBYTES, nbytes) for nbytes in self.content_nbytes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each buffer begins, on a border of 64 bytes; one more than there are buffers: the end."""
        offsets = [0]
        for nbytes in self.row_nbytes:
            end = offsets[-1] + nbytes * self.num_slots
            offsets.append(-(-end // MIN_ROW_NBYTES) * MIN_ROW_NBYTES)
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.offsets[-1]

    def addresses(self, base: int) -> tuple[int, ...]:
        """Base addresses of the six buffers in memory that begins at `base`."""
        return tuple(base + offset for offset in self.offsets[:NUM_BUFFERS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What one row says.

    logprobs: of the first token, if asked for; its `extra` does not fit and travels by message alone. hidden: the last
    hidden state's bytes. is_extended: whether cached tokens and rank are known; a base peer's rank reads 0.
    """

    token_id: int
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    hidden: bytes = b""
    is_extended: bool = True

    def as_base(self) -> Handoff:
        """The same for a peer that knows the base format alone."""
        return replace(self, is_extended=False)


class HandoffSlots:
    """Which rows are free. One owner, one thread."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can give."""
        return len(self._free)

    def allocate(self) -> int | None:
        """A slot; None if none is free: the request waits."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises InvariantError if it is free already or there is no such slot."""
        if slot not in self._taken:
            raise InvariantError(f"handoff slot {slot} of {self.num_slots} was freed but is not taken")
        self._taken.remove(slot)
        self._free.append(slot)


class HandoffRows:
    """Numpy views of the buffers over `memory`, a writable buffer of at least `layout.nbytes` bytes."""

    def __init__(self, layout: HandoffLayout, memory: memoryview | bytearray | NDArray[np.uint8]) -> None:
        content: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        if content.nbytes < layout.nbytes or not content.flags.writeable:
            raise InvariantError(f"the handoff buffers need {layout.nbytes} writable bytes, got {content.nbytes}")
        self.layout = layout
        self._rows: list[NDArray[np.uint8]] = [
            content[offset : offset + nbytes * layout.num_slots].reshape(layout.num_slots, nbytes)
            for offset, nbytes in zip(layout.offsets[:NUM_BUFFERS], layout.row_nbytes, strict=True)
        ]

    def pack(self, slot: int, handoff: Handoff) -> None:
        """Write one row of every buffer; what `handoff` does not say is zero. Top logprobs beyond K are left out.

        Raises InvariantError if the hidden state has not the layout's size.
        """
        if handoff.hidden and len(handoff.hidden) != self.layout.hidden_nbytes:
            raise InvariantError(
                f"a hidden state of {len(handoff.hidden)} bytes, rows hold {self.layout.hidden_nbytes}"
            )
        for rows in self._rows:
            rows[slot] = 0
        self._ints(IDS, slot)[TOKEN] = handoff.token_id
        if handoff.logprobs is not None:
            self._pack_logprobs(slot, handoff.logprobs)
        if handoff.hidden:
            self._rows[HIDDEN][slot, : self.layout.hidden_nbytes] = np.frombuffer(handoff.hidden, dtype=np.uint8)
        if handoff.is_extended:
            self._pack_extension(slot, handoff)

    def unpack(self, slot: int, *, num_top_logprobs: int | None = None) -> Handoff:
        """Read one row. num_top_logprobs: what the request asked for, None for no logprob; a base row does not say.

        Bytes come from a peer: counts are clipped to the row, the token is not checked against any vocabulary.
        """
        ids = self._ints(IDS, slot)
        token_id, is_extended = int(ids[TOKEN]), int(ids[VERSION]) == HANDOFF_VERSION
        has_logprob, num_top = num_top_logprobs is not None, num_top_logprobs or 0
        if is_extended:
            has_logprob, num_top = bool(ids[FLAGS] & HAS_LOGPROB), int(ids[NUM_TOP])
        num_top = max(num_top, 0)  # slices end with the row
        has_hidden = not is_extended or bool(ids[FLAGS] & HAS_HIDDEN)
        return Handoff(
            token_id=token_id,
            num_cached_tokens=max(0, int(ids[CACHED_TOKENS])) if is_extended else 0,
            logprobs=self._logprobs(slot, token_id, num_top, is_extended) if has_logprob else None,
            hidden=self._rows[HIDDEN][slot, : self.layout.hidden_nbytes].tobytes() if has_hidden else b"",
            is_extended=is_extended,
        )

    def _pack_logprobs(self, slot: int, logprobs: TokenLogprobs) -> None:
        self._floats(LOGPROB, slot)[0] = logprobs.logprob
        self._ints(LOGPROB_ID, slot)[0] = logprobs.token_id
        top = logprobs.top[: self.layout.num_top_logprobs]
        self._floats(TOP, slot)[: len(top)] = [logprob for _, logprob in top]
        self._ints(TOP_ID, slot)[: len(top)] = [token_id for token_id, _ in top]

    def _pack_extension(self, slot: int, handoff: Handoff) -> None:
        ids = self._ints(IDS, slot)
        ids[CACHED_TOKENS] = handoff.num_cached_tokens
        ids[VERSION] = HANDOFF_VERSION
        if handoff.hidden:
            ids[FLAGS] |= HAS_HIDDEN
        if handoff.logprobs is not None:
            ids[FLAGS] |= HAS_LOGPROB
            ids[RANK] = handoff.logprobs.rank
            ids[NUM_TOP] = min(len(handoff.logprobs.top), self.layout.num_top_logprobs)

    def _logprobs(self, slot: int, token_id: int, num_top: int, is_extended: bool) -> TokenLogprobs:
        values, ids = self._floats(TOP, slot)[:num_top].tolist(), self._ints(TOP_ID, slot)[:num_top].tolist()
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(self._floats(LOGPROB, slot)[0]),
            rank=int(self._ints(IDS, slot)[RANK]) if is_extended else 0,
            top=list(zip(ids, values, strict=True)),
        )

    def _ints(self, buffer: int, slot: int) -> NDArray[np.int32]:
        return self._rows[buffer][slot, : self.layout.content_nbytes[buffer]].view("<i4")

    def _floats(self, buffer: int, slot: int) -> NDArray[np.float32]:
        return self._rows[buffer][slot, : self.layout.content_nbytes[buffer]].view("<f4")


def handoff_descriptors(
    src: HandoffLayout,
    src_base: int,
    *,
    src_slot: int,
    dst_addresses: Sequence[int],
    dst_row_nbytes: Sequence[int],
    dst_slot: int,
) -> Descriptors:
    """Six copies, one row of each buffer.

    dst_row_nbytes: the destination's rows; a base peer does not tell and is taken to have the source's. Where rows
    differ in length the shorter is copied. Raises InvariantError unless there are six addresses and the source's slot
    exists.
    """
    if len(dst_addresses) != NUM_BUFFERS:
        raise InvariantError(f"{NUM_BUFFERS} aux addresses needed, the destination has {len(dst_addresses)}")
    if not 0 <= src_slot < src.num_slots:
        raise InvariantError(f"handoff slot {src_slot} is not one of {src.num_slots}")
    src_rows, dst_rows = np.array(src.row_nbytes, dtype=np.int64), np.array(dst_row_nbytes, dtype=np.int64)
    return Descriptors(
        src=np.array(src.addresses(src_base), dtype=np.int64) + src_slot * src_rows,
        dst=np.array(dst_addresses, dtype=np.int64) + dst_slot * dst_rows,
        nbytes=np.minimum(src_rows, dst_rows),
    )
