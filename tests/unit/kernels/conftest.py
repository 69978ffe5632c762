"""Every kernel test runs once for each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.kernels.library import FASTEST_FIRST, Kernels, kernels


@pytest.fixture(scope="session")
def library() -> Kernels:
    """The loaded library."""
    found = kernels()
    if found is None:
        pytest.skip("no C++ compiler: there are no kernels")
    return found


@pytest.fixture(params=FASTEST_FIRST)
def instruction_set(request: pytest.FixtureRequest, library: Kernels) -> Iterator[str]:
    """Kernels of this set, with two threads, for one test."""
    before = (library.instruction_set, library.num_threads())
    if not library.use(request.param):
        pytest.skip(f"{request.param} cannot run here")
    library.set_num_threads(2, None)
    yield request.param
    library.use(before[0])
    library.set_num_threads(before[1], None)
