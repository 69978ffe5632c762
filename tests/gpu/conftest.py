"""Where kernels are tested: on a GPU, or, where a test is small enough, in Triton's interpreter on the CPU.

Without a GPU everything here is skipped, unless TRITON_INTERPRET is set, as tests/unit/kernels/test_triton.py does in a
process of its own; then what is marked `gpu` is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and not IS_INTERPRETED:
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and (not IS_INTERPRETED or item.get_closest_marker("gpu")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def cuda() -> torch.device:
    """The GPU, for tests of what the interpreter cannot run."""
    if IS_INTERPRETED:
        pytest.skip("needs a CUDA GPU")
    torch.manual_seed(0)
    return torch.device("cuda")


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    torch.manual_seed(0)
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture(params=[pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16], ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The model's dtype. The interpreter does not round to bfloat16, it cuts off."""
    return request.param


@pytest.fixture(autouse=True)
def _no_warnings_of_the_interpreter() -> Iterator[None]:
    """It computes with numpy, which warns of an overflow that is an infinity on a GPU."""
    with np.errstate(all="ignore"):
        yield
