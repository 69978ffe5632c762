"""Every Triton kernel compiles for Hopper, on a machine without a GPU, with programmatic dependent launch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info

from diptych.kernels.cuda import activation, embedding, heads, norm, sampling

TARGET = GPUTarget("cuda", 90, 32)

# kernel; types of its arguments in order, "-" for None; constants; warps
NORM = {"SIZE": 4096, "BLOCK": 4096}
HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "PAGE_SIZE": 16, "TOKENS": 4, "HEADS": 8, "BLOCK": 64}
VOCABULARY = {"VOCAB_SIZE": 128_256, "NUM_CHUNKS": 2004}
NUMBERS = "*fp64 " * 5
KERNELS = {
    "norm": (norm._norm_kernel, "*bf16 - - *bf16 *bf16 i32 i32 i32 fp32", NORM, 16),
    "add, norm": (norm._norm_kernel, "*bf16 *bf16 - *bf16 *bf16 i32 i32 i32 fp32", NORM, 16),
    "norm, add, norm": (norm._norm_kernel, "*bf16 *bf16 *fp32 *fp32 *bf16 i32 i32 i32 fp32", NORM, 16),
    "norm, add": (norm._norm_kernel, "*bf16 *bf16 *fp32 - - i32 i32 i32 fp32", NORM, 16),
    "silu": (activation._gated_kernel, "*bf16 *bf16 i32 i32", {"SIZE": 14336, "IS_GELU": False, "BLOCK": 1024}, 4),
    "gelu": (activation._gated_kernel, "*bf16 *bf16 i32 i32", {"SIZE": 10240, "IS_GELU": True, "BLOCK": 1024}, 4),
    "embed": (
        embedding._embed_kernel, "*i64 *bf16 *i64 *bf16 i32 i32 i32 i32 fp32", {"SIZE": 4096, "BLOCK": 1024}, 4,
    ),
    "rotary table": (heads._table_kernel, "*i64 *fp32 *fp32 *fp32 i32 i32 fp32", {"HALF": 64, "BLOCK": 64}, 1),
    "heads": (
        heads._heads_kernel, "*bf16 *fp32 *fp32 *bf16 *bf16 *i64 - i32 fp32 i32 i32 i32", HEADS, 8,
    ),
    "normalised heads": (
        heads._heads_kernel, "*bf16 *fp32 *fp32 *bf16 *bf16 *i64 *bf16 i32 fp32 i32 i32 i32", HEADS, 8,
    ),
    "argmax": (
        sampling._split_argmax_kernel, "*bf16 *i64 i32", {"VOCAB_SIZE": 128_256, "SPLIT": 32_768, "BLOCK": 4096}, 8,
    ),
    "end of argmax": (sampling._finish_argmax_kernel, "*i64 *i64", {"NUM_SPLITS": 126, "BLOCK": 128}, 1),
    "chunks": (sampling._chunks_kernel, "*bf16 *fp64 *fp32 *fp32 i32", VOCABULARY | {"BLOCK": 4096}, 8),
    "draw": (
        sampling._draw_kernel,
        f"*bf16 {NUMBERS} *fp32 *fp32 *fp32 *i32 *i32 *i64 i32",
        VOCABULARY | {"CHUNKS_BLOCK": 2048},
        16,
    ),
    "last tokens": (sampling._store_last_kernel, "*i64 *i64 *i64 i32 i32", {"BLOCK": 256}, 4),
}  # fmt: skip


def current_target() -> GPUTarget:
    return TARGET


current_target.__triton_builtin__ = True  # type: ignore[attr-defined]  # constexpr functions may call it


def source_of(kernel: Any, types: str, constants: dict[str, int]) -> ASTSource:
    """The kernel for such arguments, every pointer and stride a multiple of 16."""
    given = iter(types.split())
    signature: dict[str, str] = {}
    values: dict[str, int | None] = dict(constants)
    aligned = {}
    for place, parameter in enumerate(kernel.params):
        kind = "constexpr" if parameter.name in constants else next(given)
        if kind == "-":
            kind, values[parameter.name] = "constexpr", None
        signature[parameter.name] = kind
        if kind.startswith("*") or kind == "i32":
            aligned[(place,)] = [["tt.divisibility", 16]]
    assert not list(given)
    return ASTSource(kernel, signature, values, aligned)


@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(target_info, "current_target", current_target)
    kernel, types, constants, num_warps = KERNELS[name]
    options = {"num_warps": num_warps, "launch_pdl": True}
    ptx = triton.compile(source_of(kernel, types, constants), target=TARGET, options=options).asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    if "*bf16" in types:  # rows are read and written 16 bytes at a time
        assert "ld.global.v4.b32" in ptx
        assert re.findall(r"st\.global\.\S*b16", ptx) == []
