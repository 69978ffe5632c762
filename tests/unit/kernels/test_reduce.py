"""argmax against numpy, with ties, infinities and NaN."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.reduce import argmax_rows

any_shape = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_shape
@given(rows=st.integers(1, 5), size=st.integers(1, 300), levels=st.integers(1, 50), seed=st.integers(0, 99))
def test_argmax_takes_the_first_of_equals(instruction_set: str, rows: int, size: int, levels: int, seed: int) -> None:
    x = torch.randint(-levels, 1, (rows, size), generator=torch.Generator().manual_seed(seed)).float()
    actual = argmax_rows(x)
    assert actual is not None
    assert actual.tolist() == x.numpy().argmax(axis=1).tolist()


def test_argmax_of_infinities_and_nan(instruction_set: str) -> None:
    x = torch.full((4, 50), -torch.inf)
    x[1, 49] = -1e30
    x[2, 7] = torch.inf
    x[3, [20, 30]] = torch.nan
    actual = argmax_rows(x)
    assert actual is not None
    assert actual.tolist() == [0, 49, 7, 20]
