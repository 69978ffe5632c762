"""Shared-memory collectives of ranks that are threads here, for every instruction set, against torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.library import DTYPES, Kernels

PIECE = 8192
TOKEN = 77
LEFT, MISMATCH, TIMEOUT = 4, 5, 3

any_shape = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def ranks(library: Kernels, size: int, *, timeout_ms: int = 20_000, spin_us: int = 20) -> Iterator[list[int]]:
    """Handles of `size` ranks over one segment with small pieces."""
    file = os.memfd_create("diptych-test")
    os.ftruncate(file, library.shm_nbytes(size, PIECE))
    handles = [
        library.shm_open(file, rank, size, PIECE, TOKEN, int(rank == 0), spin_us * 1000, timeout_ms * 1_000_000)
        for rank in range(size)
    ]
    os.close(file)
    assert all(handles)
    try:
        yield handles
    finally:
        for handle in handles:
            library.shm_close(handle)


def together(size: int, call: Callable[[int], object]) -> list[object]:
    """`call(rank)` on a thread each."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))


def reduce(library: Kernels, handle: int, x: torch.Tensor) -> int:
    return library.shm_allreduce(handle, x.data_ptr(), x.data_ptr(), x.numel(), DTYPES[x.dtype])


@any_shape
@given(
    size=st.integers(1, 5),
    counts=st.lists(st.one_of(st.integers(0, 300), st.integers(2000, 40_000)), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_sums_are_those_of_float32_in_rank_order(
    instruction_set: str, library: Kernels, size: int, counts: list[int], dtype: torch.dtype
) -> None:
    inputs = [[torch.randn(count).to(dtype) for count in counts] for _ in range(size)]
    expected = []
    for parts in zip(*inputs, strict=True):
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        expected.append(total.to(dtype))
    with ranks(library, size) as handles:
        codes = together(size, lambda rank: [reduce(library, handles[rank], x) for x in inputs[rank]])
    assert codes == [[0] * len(counts)] * size
    for row in inputs:
        assert all(torch.equal(actual, total) for actual, total in zip(row, expected, strict=True))


@any_shape
@given(
    size=st.integers(1, 4),
    num_rows=st.integers(0, 40),
    row_nbytes=st.one_of(st.integers(1, 70), st.sampled_from([8191, 8192, 8193, 20_000])),
)
def test_rows_are_joined(library: Kernels, size: int, num_rows: int, row_nbytes: int) -> None:
    inputs = [torch.randint(0, 255, (num_rows, row_nbytes), dtype=torch.uint8) for _ in range(size)]
    outputs = [torch.zeros(num_rows, size * row_nbytes + 1, dtype=torch.uint8)[:, :-1].contiguous() for _ in inputs]

    def gather(rank: int) -> int:
        return library.shm_allgather(
            handles[rank], outputs[rank].data_ptr(), inputs[rank].data_ptr(), num_rows, row_nbytes
        )

    with ranks(library, size) as handles:
        assert together(size, gather) == [0] * size
    assert all(torch.equal(output, torch.cat(inputs, 1)) for output in outputs)


def test_many_calls_of_both_kinds_in_turn(library: Kernels) -> None:
    """More pieces than buffers, fast and slow ranks, one of which always sleeps."""

    def work(rank: int) -> list[float]:
        sums = []
        for turn in range(200):
            x, joined = torch.full((turn * 37 % 9000 + 1,), float(rank + turn)), torch.zeros(3)
            assert reduce(library, handles[rank], x) == 0
            assert library.shm_allgather(handles[rank], joined.data_ptr(), x.data_ptr(), 1, 4) == 0
            assert library.shm_barrier(handles[rank]) == 0
            sums.append(float(joined.sum() - x.sum() / x.numel() * 3))
        return sums

    with ranks(library, 3, spin_us=0) as handles:
        assert together(3, work) == [[3.0 * (3 * turn + 3) - (3 * turn + 3) * 3 for turn in range(200)]] * 3


def test_infinities_and_nan_pass_through(instruction_set: str, library: Kernels) -> None:
    first = torch.tensor([torch.inf, torch.nan, 3e38, -0.0, torch.inf] * 20).bfloat16()
    second = torch.tensor([1.0, 1.0, 3e38, -0.0, -torch.inf] * 20).bfloat16()
    expected = first + second
    inputs = [first.clone(), second.clone()]
    with ranks(library, 2) as handles:
        together(2, lambda rank: reduce(library, handles[rank], inputs[rank]))
    for actual in inputs:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_unlike_calls_are_refused_on_both_sides_and_for_good(library: Kernels) -> None:
    inputs = [torch.ones(8), torch.ones(9)]
    with ranks(library, 2) as handles:
        codes = together(2, lambda rank: reduce(library, handles[rank], inputs[rank]))
        assert {code & 0xFF for code in codes} == {MISMATCH}
        assert codes[0] == codes[1]
        assert library.shm_barrier(handles[0]) == codes[0]


def test_a_rank_that_never_comes_is_named_when_time_is_up(library: Kernels) -> None:
    with ranks(library, 3, timeout_ms=200) as handles:
        codes = together(2, lambda rank: library.shm_barrier(handles[rank]))
    assert codes == [2 << 8 | TIMEOUT] * 2


def test_a_rank_that_has_left_is_named(library: Kernels) -> None:
    with ranks(library, 2) as handles:
        library.shm_close(handles.pop())
        assert library.shm_barrier(handles[0]) == 1 << 8 | LEFT


@pytest.mark.parametrize("other", [{"token": TOKEN + 1}, {"size": 3}, {"piece": 2 * PIECE}])
def test_another_segment_is_not_joined(library: Kernels, other: dict[str, int]) -> None:
    file = os.memfd_create("diptych-test")
    os.ftruncate(file, library.shm_nbytes(3, 2 * PIECE))
    first = library.shm_open(file, 0, 2, PIECE, TOKEN, 1, 0, 1)
    size, piece, token = other.get("size", 2), other.get("piece", PIECE), other.get("token", TOKEN)
    assert not library.shm_open(file, 1, size, piece, token, 0, 0, 1)
    library.shm_close(first)
    os.close(file)
