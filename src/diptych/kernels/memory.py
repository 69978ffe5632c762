"""Memory for weights and for large results, so that neither page faults nor small pages cost time.

Weights lie in huge pages (asked for with madvise: read bandwidth is 1.4 times that of 4 KiB pages). Large results come
from blocks that are used again as soon as the last tensor over them is gone; fresh memory of the same size would cost a
page fault for every 4 KiB. Any thread may allocate.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref

import torch

HUGE_PAGE = 1 << 21
_ARENA_NBYTES = 32 * HUGE_PAGE
_MIN_WEIGHT_NBYTES = 1 << 16
_MIN_RECYCLED_NBYTES = 1 << 18
_MAX_FREE_BLOCKS = 8  # of one size
_MIN_PADDED_ROWS = 16


def map_huge(nbytes: int) -> mmap.mmap:
    """Zeroed private memory in huge pages where the system grants them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if "MADV_HUGEPAGE" in vars(mmap):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Arena:
    """Hands out slices of one large mapping after another: a weight of 2 MB alone would fill no huge page.

    A mapping is given back when the last tensor over it is gone.
    """

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Zeroed uint8 [nbytes], 64-byte aligned."""
        if nbytes > _ARENA_NBYTES // 2:
            return torch.frombuffer(map_huge(nbytes), dtype=torch.uint8)
        if self._chunk is None or self._used + nbytes > _ARENA_NBYTES:
            self._chunk, self._used = torch.frombuffer(map_huge(_ARENA_NBYTES), dtype=torch.uint8), 0
        start = self._used
        self._used += -(-nbytes // 64) * 64
        return self._chunk[start : start + nbytes]


_arena = Arena()


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor for a weight: in huge pages if it is large."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MIN_WEIGHT_NBYTES:
        return torch.empty(shape, dtype=dtype)
    return _arena.take(nbytes).view(dtype).view(shape)


class _Recycler:
    """Blocks of memory by size, leased to tensors and taken back when the last tensor over them is gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        block = free.pop() if free else map_huge(size)
        lease = (ctypes.c_char * size).from_buffer(block)  # torch holds it as long as any view lives
        weakref.finalize(lease, self._take_back, free, block).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8, count=nbytes)

    @staticmethod
    def _take_back(free: list[mmap.mmap], block: mmap.mmap) -> None:
        if len(free) < _MAX_FREE_BLOCKS:
            free.append(block)


_recycler = _Recycler()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor for a result."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MIN_RECYCLED_NBYTES:
        return torch.empty(shape, dtype=dtype)
    return _recycler.take(nbytes).view(dtype).view(shape)


def empty_rows(num_rows: int, row_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised [num_rows, row_size]; rows of whole KiB are set apart a little further, or the same few columns of
    many rows would fall into one set of the cache."""
    if num_rows < _MIN_PADDED_ROWS or row_size * dtype.itemsize % 1024 != 0:
        return empty((num_rows, row_size), dtype)
    padding = 64 // dtype.itemsize
    return empty((num_rows, row_size + padding), dtype)[:, :row_size]


def give_back(memory: torch.Tensor) -> None:
    """Return the system's pages under a contiguous CPU tensor; it keeps its place and reads as zeros.

    What shares its first or last page with others stays. Raises: OSError if the system refuses.
    """
    page = mmap.PAGESIZE
    start = -(-memory.data_ptr() // page) * page
    length = (memory.data_ptr() + memory.nbytes) // page * page - start
    if length <= 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"{length} bytes could not be returned to the system")


def give_back_heap() -> None:
    """Return freed memory to the system, of which glibc keeps hundreds of MB while a model loads."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return
    trim(0)
