from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diptych.core.request import MAX_SEED
from diptych.sampling.random import uniforms


@given(st.integers(-MAX_SEED - 1, MAX_SEED), st.integers(0, 2**40))
def test_a_row_is_a_pure_function_of_seed_and_position(seed: int, position: int) -> None:
    alone = uniforms(np.array([seed]), np.array([position]))[0]
    among = uniforms(np.array([7, seed, -1]), np.array([0, position, 3]))[1]
    assert alone == among
    assert 0.0 <= alone < 1.0


def split_mix(state: int) -> int:
    """One output of SplitMix64 in plain integers; `state` is the state after its increment."""
    value = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


GOLDEN = 0x9E3779B97F4A7C15


def test_the_reference_gives_the_published_sequence_for_seed_1234567() -> None:
    assert [split_mix((1234567 + n * GOLDEN) % 2**64) for n in (1, 2)] == [6457827717110365317, 3203168211198807973]


@given(st.integers(-MAX_SEED - 1, MAX_SEED), st.integers(0, 2**40))
def test_numbers_are_those_of_the_reference_and_so_never_change(seed: int, position: int) -> None:
    stream = split_mix((seed + GOLDEN) % 2**64)
    expected = (split_mix((stream + (position + 1) * GOLDEN) % 2**64) >> 11) / 2**53
    assert uniforms(np.array([seed]), np.array([position])).tolist() == [expected]


def test_streams_of_neighbouring_seeds_do_not_overlap() -> None:
    seeds, positions = np.meshgrid(np.arange(200), np.arange(200))
    assert len(np.unique(uniforms(seeds.ravel(), positions.ravel()))) == 200 * 200


def test_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    ramp = np.arange(20_000)
    for seeds, positions in ((ramp, ramp * 0), (ramp * 0 + 3, ramp), (ramp, ramp)):
        counts = np.histogram(uniforms(seeds, positions), bins=100, range=(0, 1))[0]
        chi_square = float(((counts - 200) ** 2 / 200).sum())
        assert chi_square < 99 + 5 * np.sqrt(2 * 99)
