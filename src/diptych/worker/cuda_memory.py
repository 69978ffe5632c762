"""How much memory the largest step takes on a CUDA device, measured by running it. Worker's thread."""

from __future__ import annotations

import torch

from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.transformer import Transformer

RESERVED_NBYTES = 1 << 30
"""For what the trial does not see: decode graphs, attention's workspace, sampling, the allocator's odd ends."""


@torch.inference_mode()
def largest_step_nbytes(model: Transformer, layout: KVLayout, *, num_tokens: int, num_rows: int) -> int:
    """Bytes that a step of `num_tokens` tokens, `num_rows` of them sampled, takes beyond weights and KV pool."""
    device = model.embed_tokens.weight.device
    if layout.itemsize != 2 or model.layer_blocks is None:
        # Plain torch, whose attention depends on lengths, and experts on tokens: no trial step would tell.
        return RESERVED_NBYTES
    # Imported here: the fallback for a GPU needs no Triton.
    from diptych.models.cuda_transformer import CudaStep, CudaTransformer

    pool = KVPool(layout, 1, device, model.embed_tokens.weight.dtype)
    transformer = CudaTransformer(model, pool, torch.zeros(1, dtype=torch.int64, device=device))
    num_rows = min(num_rows, num_tokens)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    step = CudaStep(
        token_ids=zeros,
        positions=zeros,
        kv_slots=zeros - 1,
        logit_rows=zeros[:num_rows],
        attend=lambda query, spec: torch.zeros(query.shape, dtype=query.dtype, device=device),
    )
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    transformer.logits(transformer.forward(step)).float()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak + RESERVED_NBYTES
