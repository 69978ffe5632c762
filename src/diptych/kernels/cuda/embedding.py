"""The token embedding, which also looks up the tokens that the host does not know yet. T = tokens, n = hidden size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.kernels.cuda.compat import supports_dependent_launch, wait_for_inputs

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def _embed_kernel(
    token_ids_ptr,
    table_ptr,
    last_tokens_ptr,
    out_ptr,
    table_stride,
    out_stride,
    num_slots,
    vocab_size,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids_ptr + row)
    if token < 0:
        token = tl.load(last_tokens_ptr + tl.minimum(-(token + 1), num_slots - 1))
    token = tl.maximum(0, tl.minimum(token, vocab_size - 1))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(table_ptr + token * table_stride + columns, mask=mask, other=0.0)
    if scale is not None:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out_ptr + row * out_stride + columns, value, mask=mask)


def embed(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    last_tokens: torch.Tensor,
    out: torch.Tensor,
    scale: float | None = None,
) -> None:
    """Rows of the table, times `scale` if given.

    Args: token_ids: int64 [T]; an id below 0 means the last token of slot -id - 1. table: [vocab, n]. last_tokens:
    int64 [num_slots]. out: [T, n]. scale: rounded to the table's dtype by the caller.
    Ids and slots out of range, as rows that pad a batch may have, read some row of the table.
    """
    num_tokens, size = out.shape
    _embed_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        token_ids,
        table,
        last_tokens,
        out,
        table.stride(0),
        out.stride(0),
        last_tokens.shape[0],
        table.shape[0],
        scale,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        launch_pdl=supports_dependent_launch(token_ids.device),
    )
