"""Embedding rows of known tokens, and of those that only the device knows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from diptych.kernels.cuda.embedding import embed


@pytest.mark.parametrize("scale", [None, 50.5])
@pytest.mark.parametrize("size", [24, 1100, pytest.param(4096, marks=pytest.mark.gpu)])
def test_rows(device: torch.device, dtype: torch.dtype, size: int, scale: float | None) -> None:
    table = torch.randn(50, size + 8, device=device).to(dtype)[:, :size]
    last_tokens = torch.tensor([7, 49, 0], device=device)
    token_ids = torch.tensor([3, -1, 49, -2, -3, 0], device=device)
    out = torch.empty(6, size, dtype=dtype, device=device)
    embed(token_ids, table, last_tokens=last_tokens, out=out, scale=scale)
    expected = table[torch.tensor([3, 7, 49, 49, 0, 0], device=device)]
    assert torch.equal(out, expected if scale is None else expected * scale)


def test_ids_out_of_range_read_some_row(device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(10, 16, device=device).to(dtype)
    last_tokens = torch.tensor([-1, 99], device=device)
    token_ids = torch.tensor([10, 2**40, -1, -2, -3, -(2**63)], device=device)
    out = torch.empty(6, 16, dtype=dtype, device=device)
    embed(token_ids, table, last_tokens=last_tokens, out=out)
    assert torch.equal(out, table[torch.tensor([9, 9, 0, 9, 9, 9], device=device)])
