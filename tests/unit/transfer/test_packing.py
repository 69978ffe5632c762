"""Pieces packed and unpacked are where they belong, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import InvariantError
from diptych.transfer.packing import gather, scatter


@given(st.data())
def test_there_and_back(data: st.DataObject) -> None:
    unit, per_piece = 8 * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    places = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True))
    nbytes = unit * per_piece
    offsets = np.array(places, dtype=np.int64) * nbytes
    memory = np.random.default_rng(1).integers(1, 255, 21 * nbytes, dtype=np.uint8)
    packed = np.zeros(len(places) * nbytes, dtype=np.uint8)
    gather(memory, offsets, nbytes=nbytes, packed=packed)
    assert packed.tobytes() == b"".join(memory[place * nbytes :][:nbytes].tobytes() for place in places)
    there = np.zeros_like(memory)
    scatter(packed, offsets, nbytes=nbytes, memory=there)
    touched = np.isin(np.arange(21).repeat(nbytes), places)
    assert (there[touched] == memory[touched]).all() and not there[~touched].any()


@pytest.mark.parametrize(("offset", "nbytes", "size"), [(0, 12, 12), (4, 8, 8), (0, 8, 16)])
def test_what_cannot_be_packed_is_a_bug(offset: int, nbytes: int, size: int) -> None:
    offsets, packed = np.array([offset]), np.zeros(size, dtype=np.uint8)
    with pytest.raises(InvariantError):
        gather(np.zeros(48, dtype=np.uint8), offsets, nbytes=nbytes, packed=packed)
    with pytest.raises(InvariantError):
        scatter(packed, offsets, nbytes=nbytes, memory=np.zeros(48, dtype=np.uint8))
