"""The slot table of sampling on a GPU: draws that are not waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from diptych.core.request import SamplingParams
from diptych.sampling.sampler import Sampler

VOCAB = 128_256
ASKED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=2),
    SamplingParams(temperature=1.2, min_p=0.05, seed=3),
    SamplingParams(temperature=0.6, top_p=0.95, seed=4),
]


def make_sampler(device: torch.device) -> Sampler:
    sampler = Sampler(VOCAB, 8, device=device, grammars=None)
    for slot, sampling in enumerate(ASKED):
        sampler.admit(slot, sampling, [5, 6, 7], 3, (0,))
    return sampler


@pytest.fixture
def no_waiting(cuda: torch.device) -> Iterator[torch.device]:
    """The device; whatever synchronises with it fails."""
    make_sampler(cuda).warm_up(torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    yield cuda
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_is_waited_for(no_waiting: torch.device) -> None:
    sampler = make_sampler(no_waiting)
    logits = 3 * torch.randn(len(ASKED), VOCAB, device=no_waiting, dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        token_ids = sampler.sample_device(logits, list(range(len(ASKED))))
    torch.cuda.set_sync_debug_mode("default")
    assert (token_ids >= 0).all()


def test_a_slot_gets_the_same_tokens_in_any_batch(cuda: torch.device) -> None:
    """In any order, beside any rows, left on the device or not."""
    together, apart, waited = make_sampler(cuda), make_sampler(cuda), make_sampler(cuda)
    slots = list(range(len(ASKED)))
    for _ in range(4):
        logits = 3 * torch.randn(len(ASKED), VOCAB, device=cuda, dtype=torch.bfloat16)
        tokens = together.sample_device(logits, slots).tolist()
        assert [int(apart.sample_device(logits[slot : slot + 1], [slot])) for slot in slots] == tokens
        assert waited.sample(logits.float(), slots).token_ids.tolist() == tokens
        assert tokens[0] == int(logits[0].argmax())


def test_unsound_rows(cuda: torch.device) -> None:
    logits = torch.randn(len(ASKED), VOCAB, device=cuda)
    logits[1, 77] = torch.nan
    logits[3] = -torch.inf
    slots = list(range(len(ASKED)))
    tokens = make_sampler(cuda).sample_device(logits, slots).tolist()
    assert [token >= 0 for token in tokens] == [True, False, True, False, True]
    rows = make_sampler(cuda).sample(logits, slots)
    assert [error is None for error in rows.errors] == [True, False, True, False, True]
