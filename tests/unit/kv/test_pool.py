from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool

CPU = torch.device("cpu")
LAYOUT = KVLayout(layers=range(2, 5), kv_heads=range(2), head_dim=4, page_size=3, dtype="float32")


def make_pool(num_pages: int = 5) -> KVPool:
    return KVPool(LAYOUT, num_pages, CPU, torch.float32)


def test_shape_and_addresses() -> None:
    pool = make_pool()
    assert pool.tensor.shape == (5, 3, 2, 3, 2, 4)
    assert pool.nbytes == pool.tensor.numel() * 4
    assert pool.data_ptr % 4096 == 0
    assert pool.tensor[3].data_ptr() == pool.data_ptr + 3 * LAYOUT.page_nbytes
    assert not pool.tensor.any()


def test_layer_views_lie_where_the_layout_says() -> None:
    pool = make_pool()
    for layer in LAYOUT.layers:
        for kv, view in enumerate(pool.layer(layer)):
            assert view.shape == (5, 3, 2, 4)
            expected = pool.data_ptr + 2 * LAYOUT.page_nbytes + LAYOUT.offset(layer, kv, 1, 1)
            assert view[2, 1, 1].data_ptr() == expected


def test_write_stores_each_token_in_its_slot_and_nothing_else() -> None:
    pool = make_pool()
    key, value = torch.randn(4, 2, 4), torch.randn(4, 2, 4)
    slots = torch.tensor([13, 0, 7, 6])
    pool.write(3, key, value, slots)
    expected = torch.zeros(5, 3, 2, 3, 2, 4)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 3, 1, 0, slot % 3] = key[token]
        expected[slot // 3, 1, 1, slot % 3] = value[token]
    assert torch.equal(pool.tensor, expected)


def test_write_takes_strided_keys() -> None:
    pool = make_pool()
    fused = torch.randn(2, 6, 4)  # query, key and value heads side by side
    key, value = fused[:, 2:4], fused[:, 4:6]
    pool.write(2, key, value, torch.tensor([4, 5]))
    assert torch.equal(pool.layer(2)[0][1, 1:3], key)
    assert torch.equal(pool.layer(2)[1][1, 1:3], value)


def test_memory_is_not_taken_before_it_is_written() -> None:
    layout = KVLayout.single_rank(4, 4, head_dim=64, page_size=16, dtype="bfloat16")

    def resident_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_nbytes()
    pool = KVPool(layout, 2**29 // layout.page_nbytes, CPU, torch.bfloat16)
    assert pool.nbytes == 2**29
    assert resident_nbytes() - before < 2**26


@pytest.mark.parametrize(("num_pages", "dtype"), [(0, torch.float32), (4, torch.bfloat16)])
def test_senseless_pools_are_refused(num_pages: int, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError):
        KVPool(LAYOUT, num_pages, CPU, dtype)


def test_page_bookkeeping_leaves_torch_unimported() -> None:
    code = "import sys, diptych.kv.cache, diptych.kv.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_latent_pool_keeps_one_row_a_token() -> None:
    layout = KVLayout.single_rank(2, 1, head_dim=6, page_size=3, dtype="float32", is_latent=True)
    pool = KVPool(layout, 4, CPU, torch.float32)
    row = torch.randn(2, 1, 6)
    pool.write(1, row, row[..., :4], torch.tensor([7, 3]))
    keys, values = pool.layer(1)
    assert torch.equal(keys[2, 1], row[0])
    assert torch.equal(keys[1, 0], row[1])
    assert values.data_ptr() == keys.data_ptr()
    assert pool.tensor[:, 0].any().item() is False
    assert pool.nbytes == 4 * 2 * 3 * 6 * 4
