"""Staging: three steps that together do what the plan says, and a choice that follows the cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import InvariantError
from diptych.transfer.plan import Descriptors
from diptych.transfer.staging import TransferCost, staged_rounds

# The shape of what was measured on one GPU: 8 us a descriptor, 1 TB/s on the wire, 2 TB/s for a copy kernel.
COST = TransferCost(descriptor_s=8e-6, wire_bytes_per_s=1e12, copy_bytes_per_s=2e12, launch_s=5e-6)


def pieces(sizes: list[int]) -> Descriptors:
    nbytes = np.array(sizes, dtype=np.int64)
    starts = np.cumsum(nbytes) - nbytes
    return Descriptors(starts + 10_000, starts[::-1].copy() * 2 + 50_000, nbytes)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60))
def test_the_three_steps_do_what_the_plan_says(sizes: list[int], stage_nbytes: int) -> None:
    plan = pieces(sizes)
    direct, staged = np.zeros(70_000, np.uint8), np.zeros(70_000, np.uint8)
    for memory in (direct, staged):
        memory[10_000 : 10_000 + sum(sizes)] = np.arange(sum(sizes)) % 250 + 1
    copy(plan, direct)
    num_rounds = 0
    for step in staged_rounds(plan, 1_000, dst_stage=2_000, stage_nbytes=stage_nbytes):
        assert len(step.write) == 1 and step.write.total_nbytes <= stage_nbytes
        assert step.pack.total_nbytes == step.write.total_nbytes == step.scatter.total_nbytes
        for part in (step.pack, step.write, step.scatter):
            copy(part, staged)
        num_rounds += 1
    assert (direct[10_000:] == staged[10_000:]).all()
    assert num_rounds <= max(1, 2 * sum(sizes) // stage_nbytes + 1)


def copy(descriptors: Descriptors, memory: np.ndarray) -> None:
    for src, dst, nbytes in zip(descriptors.src, descriptors.dst, descriptors.nbytes, strict=True):
        memory[dst : dst + nbytes] = memory[src : src + nbytes]


def test_a_copy_that_does_not_fit_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="21 bytes does not fit a buffer of 20"):
        list(staged_rounds(pieces([3, 21]), 0, dst_stage=0, stage_nbytes=20))


def test_small_pieces_are_staged_and_large_ones_are_not() -> None:
    assert COST.prefers_staging(pieces([256] * 4096), 1 << 26)
    assert not COST.prefers_staging(pieces([8 << 20] * 4), 1 << 26)
    assert not COST.prefers_staging(pieces([256]), 1 << 26)
    assert not COST.prefers_staging(pieces([256] * 4096), 0)
    assert not COST.prefers_staging(pieces([]), 1 << 26)


def test_costs_add_up() -> None:
    assert COST.direct_s(10, 10**9) == pytest.approx(80e-6 + 1e-3)
    assert COST.staged_s(10**9, 5 * 10**8) == pytest.approx(2 * (10e-6 + 0.5e-3) + 16e-6 + 1e-3)
