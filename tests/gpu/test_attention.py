"""FlashInfer and our decode kernel against the dense float32 computation, on the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_problem import LAYER, Problem, Shape

MIXED = ((1, 1), (1, 37), (5, 5), (3, 20), (1, 9), (1, 64), (11, 12), (300, 700), (1, 2000))
BASE = Shape(
    MIXED, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16, device="cuda", filler=0.0
)
SHAPES = {
    "llama": BASE,
    "one kv head each": replace(BASE, num_heads=2),
    "wide group": replace(BASE, num_heads=16, num_kv_heads=1),
    "head 64": replace(BASE, head_dim=64),
    "head 256": replace(BASE, head_dim=256),
    "head 256, window": replace(BASE, head_dim=256, window=100),
    "pages of 1": replace(BASE, page_size=1),
    "pages of 64": replace(BASE, page_size=64),
}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_ragged_rows(cuda: torch.device, name: str) -> None:
    from diptych.attention.flashinfer import FlashInferAttention

    problem = Problem(SHAPES[name])
    close(problem.run(FlashInferAttention(problem.pool)), problem.expected())


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_decode_rows_beside_prefill_rows(cuda: torch.device, name: str) -> None:
    from diptych.attention.flashinfer import DecodeRows, FlashInferAttention, PrefillRows, StepAttention

    shape = SHAPES[name]
    rows = tuple(sorted(shape.rows, key=lambda row: row[0] > 1))
    problem = Problem(replace(shape, rows=rows))
    backend = FlashInferAttention(problem.pool)
    problem.run(backend)  # writes this step's K and V
    num_decodes = sum(query_len == 1 for query_len, _ in rows)
    decodes = DecodeRows(
        table=problem.inputs.page_table,
        rows=torch.arange(num_decodes, dtype=torch.int32, device=cuda),
        kv_lens=problem.inputs.kv_lens[:num_decodes],
    )
    pages = [page for pages in problem.pages[num_decodes:] for page in pages]
    prefills = PrefillRows(
        query_lens=np.array([query_len for query_len, _ in rows[num_decodes:]], dtype=np.int32),
        kv_lens=np.array([kv_len for _, kv_len in rows[num_decodes:]], dtype=np.int32),
        pages=torch.tensor(pages, dtype=torch.int32, device=cuda),
    )
    assert problem.spec.layer == LAYER
    close(StepAttention(backend, decodes, prefills)(problem.query, problem.spec), problem.expected())
