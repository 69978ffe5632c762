"""Decode attention over the page-major pool against float32 torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from diptych.kernels.cuda.decode_attention import (
    DecodeConfig,
    decode_attention,
    decode_workspace,
    plan_decode,
)

pytestmark = pytest.mark.gpu

POISON = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Shapes of one call."""

    lengths: list[int]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor


def new_inputs(case: Case, device: torch.device) -> Inputs:
    """Random queries and pool, pages in random order; table entries that must not be read are far out of range."""
    torch.manual_seed(sum(case.lengths))
    pages = [-(-length // case.page_size) for length in case.lengths]
    order = torch.randperm(sum(pages) + 3).tolist()
    table = torch.full((len(pages), max(1, *pages) + 2), POISON, dtype=torch.int32)
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    shape = (sum(pages) + 3, 2, 2, case.page_size, case.num_kv_heads, case.head_dim)
    pool = torch.randn(shape, device=device, dtype=torch.bfloat16)
    # Query heads lie beside the key and value heads, as a fused projection leaves them.
    heads = torch.randn(len(pages), case.num_heads + 3, case.head_dim, device=device, dtype=torch.bfloat16)
    return Inputs(
        query=heads[:, : case.num_heads],
        key_cache=pool[:, 1, 0],
        value_cache=pool[:, 1, 1],
        page_table=table.to(device),
        kv_lens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
    )


def reference(case: Case, inputs: Inputs) -> torch.Tensor:
    """Row by row in float32."""
    out = torch.zeros(inputs.query.shape, device=inputs.query.device)
    ratio = case.num_heads // case.num_kv_heads
    for row, length in enumerate(case.lengths):
        if length == 0:
            continue
        token = torch.arange(max(0, length - (case.window or length)), length, device=out.device)
        page = inputs.page_table[row].long()[token // case.page_size]
        key, value = (
            cache[page, token % case.page_size].float().repeat_interleave(ratio, dim=1)
            for cache in (inputs.key_cache, inputs.value_cache)
        )
        scores = torch.einsum("hd,thd->ht", inputs.query[row].float(), key) * case.head_dim**-0.5
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), value)
    return out


CASES = {
    "one token": Case(lengths=[1]),
    "one short": Case(lengths=[600]),
    "one long": Case(lengths=[70001]),
    "unequal": Case(lengths=[1, 16, 17, 4096, 64, 63, 65, 20000, 128, 999]),
    "empty rows": Case(lengths=[0, 40, 0, 0, 300, 0]),
    "all empty": Case(lengths=[0, 0]),
    "many": Case(lengths=[(37 * row) % 700 for row in range(300)]),
    "window": Case(lengths=[5, 512, 513, 3000, 700, 0], window=512),
    "window of one": Case(lengths=[5, 64, 65], window=1),
    "soft cap": Case(lengths=[900, 3], soft_cap=2.0),
    "window and cap": Case(lengths=[2100, 30], window=100, soft_cap=5.0),
    "no groups": Case(lengths=[333, 70], num_heads=8, num_kv_heads=8),
    "three to one": Case(lengths=[333, 70], num_heads=9, num_kv_heads=3),
    "one kv head": Case(lengths=[333, 2000], num_heads=4, num_kv_heads=1, head_dim=256),
    "sixteen to one": Case(lengths=[333, 70], num_heads=32, num_kv_heads=2),
    "twenty to one": Case(lengths=[333, 2500], num_heads=20, num_kv_heads=1),
    "head_dim 64": Case(lengths=[333, 70, 5000], head_dim=64),
    "head_dim 256": Case(lengths=[333, 70, 5000], head_dim=256, window=1024),
    "pages of 1": Case(lengths=[333, 70], page_size=1),
    "pages of 5": Case(lengths=[333, 70], page_size=5),
    "pages of 64": Case(lengths=[333, 70, 3000], page_size=64),
    "pages of 128": Case(lengths=[333, 70, 3000], page_size=128),
}


@pytest.mark.parametrize(
    "config",
    [
        None,
        DecodeConfig(per_processor=8, tile=32, stages=2, warps=1, merge_elements=1024),
        DecodeConfig(per_processor=1, tile=16, stages=3, warps=4, merge_elements=2048),
    ],
    ids=["chosen", "many programs", "few programs"],
)
@pytest.mark.parametrize("plan_is_settled", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_agrees_with_torch(
    device: torch.device, case: Case, plan_is_settled: bool, config: DecodeConfig | None
) -> None:
    inputs = new_inputs(case, device)
    workspace = decode_workspace(
        len(case.lengths) + 1,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        device=device,
    )
    plan_decode(inputs.kv_lens, workspace, window=case.window, config=config)
    if plan_is_settled:
        torch.cuda.synchronize()
    outs = []
    for _ in range(3):  # layers of one step share the plan, and leave the workspace as they found it
        out = torch.full(inputs.query.shape, float("nan"), dtype=torch.bfloat16, device=device)
        decode_attention(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            page_table=inputs.page_table,
            kv_lens=inputs.kv_lens,
            out=out,
            scale=case.head_dim**-0.5,
            workspace=workspace,
            window=case.window,
            soft_cap=case.soft_cap,
            plan_is_settled=plan_is_settled,
            config=config,
        )
        outs.append(out)
    expected = reference(case, inputs)
    assert (outs[0].float() - expected).norm() <= 5e-3 * expected.norm()
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not workspace.arrived.any()


def test_a_graph_follows_the_lengths(device: torch.device) -> None:
    """One captured graph serves any lengths: the host knows none of them."""
    long, short = Case(lengths=[9000, 800, 1, 40]), Case(lengths=[3, 0, 700, 41])
    inputs = new_inputs(long, device)
    workspace = decode_workspace(4, num_heads=32, num_kv_heads=8, head_dim=128, device=device)
    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device=device)

    def step() -> None:
        plan_decode(inputs.kv_lens, workspace)
        decode_attention(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            page_table=inputs.page_table,
            kv_lens=inputs.kv_lens,
            out=out,
            scale=128**-0.5,
            workspace=workspace,
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in (long, short, long):
        if case is short:
            inputs.page_table.copy_(inputs.page_table.clamp(max=0))
        else:
            inputs.page_table.copy_(new_inputs(long, device).page_table)
        inputs.kv_lens.copy_(torch.tensor(case.lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(case, inputs)
        assert (out.float() - expected).norm() <= 5e-3 * expected.norm()
