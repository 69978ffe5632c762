"""The two ends of a model: embedding rows, and logits with and without a table of their own."""

from __future__ import annotations

import pytest
import torch

from diptych.kernels.linear import Quantization
from diptych.layers.embedding import Embedding
from diptych.layers.logits import LogitsHead


def table(scale: float | None = None, dtype: torch.dtype = torch.float32) -> Embedding:
    embedding = Embedding(11, 6, scale=scale, dtype=dtype, device="cpu")
    embedding.weight.copy_(torch.randn(11, 6))
    return embedding


def test_embedding_picks_rows_and_never_writes_its_table() -> None:
    embedding = table(scale=3.0)
    before = embedding.weight.clone()
    token_ids = torch.tensor([3, 3, 10])
    torch.testing.assert_close(embedding(token_ids), before[token_ids] * 3.0)
    assert torch.equal(embedding.weight, before)


def test_scale_is_rounded_to_the_dtype() -> None:
    embedding = table(scale=2560**0.5, dtype=torch.bfloat16)
    assert embedding.scale == 50.5
    token_ids = torch.tensor([1, 2])
    assert torch.equal(embedding(token_ids), embedding.weight[token_ids] * torch.tensor(50.5).bfloat16())


def test_tied_head_shares_the_table_and_loads_nothing() -> None:
    embedding = table()
    head = LogitsHead(11, 6, tied_to=embedding, dtype=torch.float32, device="cpu")
    assert head.weight is embedding.weight
    hidden = torch.randn(2, 6)
    torch.testing.assert_close(head(hidden), hidden @ embedding.weight.T)


def test_logits_are_float32_and_capped() -> None:
    head = LogitsHead(11, 6, soft_cap=2.0, dtype=torch.bfloat16, device="cpu")
    head.weight.copy_(torch.randn(11, 6) * 10)
    hidden = torch.randn(3, 6).bfloat16()
    logits = head(hidden)
    assert logits.dtype == torch.float32
    assert logits.abs().max() <= 2.0
    torch.testing.assert_close(logits, 2.0 * torch.tanh((hidden @ head.weight.T).float() / 2.0))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_likeliest_is_the_argmax_of_the_logits_where_a_kernel_can_tell(quantization: Quantization) -> None:
    head = LogitsHead(300, 64, dtype=torch.bfloat16, device="cpu")
    head.weight.copy_(torch.randn(300, 64))
    hidden = torch.randn(3, 64).bfloat16()
    assert head.likeliest(hidden) is None
    head.pack(quantization)
    if head.packed is None:
        pytest.skip("there are no kernels here")
    logits, likeliest = head(hidden), head.likeliest(hidden)
    assert likeliest is not None
    assert torch.equal(likeliest[0], logits.argmax(dim=1))
    assert torch.equal(likeliest[1], logits.amax(dim=1))
    head.soft_cap = 30.0
    assert head.likeliest(hidden) is None
