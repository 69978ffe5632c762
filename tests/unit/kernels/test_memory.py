"""Recycled results and weights in huge pages."""

from __future__ import annotations

import torch

from diptych.kernels.memory import empty, empty_rows, empty_weight


def test_a_block_comes_back_when_its_last_view_is_gone() -> None:
    first = empty((3, 1 << 20), torch.float32)
    address = first.data_ptr()
    view = first[1:, 5:]
    del first
    assert empty((3, 1 << 20), torch.float32).data_ptr() != address, "a view still needs the block"
    del view
    addresses = {empty((3, 1 << 20), torch.float32).data_ptr() for _ in range(3)}
    assert address in addresses


def test_live_results_never_share_memory() -> None:
    results = [empty((1 << 19,), torch.bfloat16).fill_(value) for value in range(12)]
    assert [result.unique().tolist() for result in results] == [[value] for value in range(12)]


def test_rows_of_whole_kilobytes_are_set_apart() -> None:
    assert empty_rows(64, 2048, torch.bfloat16).stride() == (2048 + 32, 1)
    assert empty_rows(64, 640, torch.bfloat16).is_contiguous()
    assert empty_rows(1, 2048, torch.bfloat16).is_contiguous()


def test_weights_do_not_overlap_and_are_aligned() -> None:
    weights = [empty_weight((rows, 512), torch.bfloat16) for rows in (1, 300, 301, 70_000, 299)]
    for value, weight in enumerate(weights):
        weight.fill_(value)
    assert [weight.unique().tolist() for weight in weights] == [[value] for value in range(5)]
    assert all(weight.data_ptr() % 64 == 0 for weight in weights)
