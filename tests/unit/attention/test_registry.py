"""Choice of a backend by name."""

from __future__ import annotations

import sys

import pytest
import torch

from diptych.attention.reference import ReferenceAttention
from diptych.attention.registry import AUTO, BACKENDS, create_attention, resolve_attention
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool

LAYOUT = KVLayout.single_rank(1, 1, head_dim=8, page_size=4, dtype="float32")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_is_one_that_runs_there(device: str) -> None:
    assert device in BACKENDS[resolve_attention(AUTO, device)].devices


def test_auto_is_the_fastest_on_a_cpu_with_kernels() -> None:
    assert resolve_attention(AUTO) == "cpu"


def test_flashinfer_is_not_for_four_byte_kv() -> None:
    assert resolve_attention(AUTO, "cuda", itemsize=4) == "reference"


def test_a_backend_that_is_not_installed_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pool = KVPool(LAYOUT, 2, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="'flashinfer' cannot be loaded"):
        create_attention("flashinfer", pool)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_name_stands_for_itself(name: str) -> None:
    assert resolve_attention(name) == name


def test_an_unknown_name_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*auto, .*reference"):
        resolve_attention("flash")


def test_a_backend_is_made_over_its_pool() -> None:
    pool = KVPool(LAYOUT, 2, torch.device("cpu"), torch.float32)
    backend = create_attention("reference", pool)
    assert isinstance(backend, ReferenceAttention)
    assert backend.pool is pool
