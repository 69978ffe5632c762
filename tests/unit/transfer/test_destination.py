"""What a decode rank may ask for; whatever passes can be planned."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.request import Request, SamplingParams
from diptych.errors import PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.backend import MemoryKind, MemorySpace
from diptych.transfer.destination import Destination, Stream, adapter_problem, destination_of
from diptych.transfer.extension import LayoutFields, OtherVersion, PeerExtension, RoomExtension
from diptych.transfer.handoff import HandoffLayout
from diptych.transfer.plan import PageOrder, plan
from diptych.transfer.wire import Registration, TransferInfo

LAYOUT = KVLayout.single_rank(3, 2, head_dim=4, page_size=8, dtype="bfloat16")
HANDOFF = HandoffLayout(num_slots=4, num_top_logprobs=32, hidden_nbytes=16)
OURS = PeerExtension(
    instance_id="prefill",
    layout=LayoutFields.of(LAYOUT, 100),
    model_layers=3,
    model_kv_heads=2,
    model_fingerprint="m",
    num_top_logprobs=32,
    hidden_nbytes=16,
)
THEIRS = msgspec.structs.replace(
    OURS, instance_id="decode", layout=LayoutFields.of(replace(LAYOUT, page_size=16), 50), num_top_logprobs=20
)
PEER = Registration(
    endpoint="h",
    port=1,
    agent_name="a",
    agent_metadata=b"",
    kv_addresses=(4096,),
    aux_addresses=(1, 2, 3, 4, 5, 6),
    gpu_id=0,
    extension=THEIRS,
)
BASE = replace(PEER, extension=None, kv_addresses=tuple(range(6)))


def destination(registration: Registration = PEER) -> Destination:
    return destination_of(registration, OURS, handoff=HANDOFF)


def only(found: Destination) -> Stream:
    """Where a single rank writes to a single one."""
    (stream,) = found.streams[0, 0]
    assert (stream.rank, stream.agent) == (0, "a") and found.pairs == {(0, "a")}
    return stream


def asked(pages: list[int], *, instance_id: str = "decode", cached: int = 0, is_base: bool = False) -> TransferInfo:
    extension = None if is_base else RoomExtension(instance_id=instance_id, num_cached_tokens=cached)
    return TransferInfo(
        room=9,
        endpoint="h",
        port=1,
        agent_name="a",
        dst_pages=np.array(pages, np.int32),
        aux_slot=0,
        num_readers=1,
        extension=extension,
    )


def test_our_peer_says_what_it_is() -> None:
    found = destination()
    assert (found.is_base, found.num_pages, found.instance_id) == (False, 50, "decode")
    template = only(found).template
    assert template.dst == THEIRS.layout.layout() and template.dst_order is PageOrder.PAGE_MAJOR
    assert found.aux_row_nbytes == (64, 64, 64, 80, 80, 64)


def test_a_base_peer_is_taken_to_be_like_us() -> None:
    found = destination(BASE)
    assert (found.is_base, found.num_pages) == (True, None)
    template = only(found).template
    assert template.dst == LAYOUT and template.dst_order is PageOrder.LAYER_MAJOR
    assert found.aux_row_nbytes == HANDOFF.row_nbytes == (64, 64, 64, 128, 128, 64)


@pytest.mark.parametrize(
    "registration,message",
    [
        (replace(PEER, extension=OtherVersion(3)), "version 3, we speak 1"),
        (
            replace(PEER, extension=msgspec.structs.replace(THEIRS, model_fingerprint="n", model_layers=4)),
            "model is m here and n there; number of layers is 3 here and 4 there",
        ),
        (replace(PEER, kv_addresses=(1, 2)), "KV base addresses: 1 expected here, 2 registered there"),
        (replace(BASE, kv_addresses=(1,)), "KV base addresses: 6 expected here, 1 registered there"),
        (replace(BASE, aux_addresses=(1,) * 5), "aux base addresses: 6 expected here, 5 registered there"),
    ],
)
def test_peers_that_are_refused(registration: Registration, message: str) -> None:
    with pytest.raises(PeerIncompatible, match=message):
        destination(registration)


@pytest.mark.parametrize(
    "info,message",
    [
        (asked([1], is_base=True), "do not go together"),
        (replace(asked([1]), extension=OtherVersion(2)), "version 2, we speak 1"),
        (asked([1, 2], instance_id="older"), "instance older asks, decode has registered"),
        (asked([1]), "2 pages of 16 tokens are needed, 1 were named"),
        (asked([1, 2, 3]), "2 pages of 16 tokens are needed, 3 were named"),
        (asked([1], cached=8), "8 cached tokens of 20, in pages of 16"),
        (asked([1], cached=32), "32 cached tokens of 20"),
        (asked([1, 50]), "page 50 was named, the pool has 50"),
    ],
)
def test_requests_that_are_refused(info: TransferInfo, message: str) -> None:
    problem = destination().problem(info, 20)
    assert problem is not None and message in problem


def test_requests_that_are_served() -> None:
    assert destination().problem(asked([1, 49]), 20) is None
    assert destination().problem(asked([3], cached=16), 20) is None
    assert destination().problem(asked([]), 20) is None
    assert destination(BASE).problem(asked([5, 6, 7], is_base=True), 20) is None
    assert destination(BASE).problem(asked([5, 6, 7, 8], is_base=True), 20) is None
    problem = destination(BASE).problem(asked([5, 6], is_base=True), 20)
    assert problem is not None and "3 pages of 8 tokens are needed, 2 were named" in problem


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.lists(st.integers(0, 60), min_size=1, max_size=6, unique=True))
def test_what_passes_can_be_planned(num_tokens: int, cached: int, pages: list[int]) -> None:
    target = destination()
    info = asked(pages, cached=cached)
    if target.problem(info, num_tokens) is not None:
        return
    found = plan(
        only(target).template,
        np.arange(-(-num_tokens // LAYOUT.page_size)),
        dst_pages=info.dst_pages.astype(np.int64),
        src_base=0,
        dst_bases=only(target).kv_addresses,
        tokens=range(cached, num_tokens),
        dst_first_token=target.num_cached_tokens(info),
    )
    assert found.total_nbytes >= (num_tokens - cached) * LAYOUT.token_nbytes
    assert int((found.dst + found.nbytes).max()) <= 4096 + 50 * only(target).template.dst_stride


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ("dram", "dram", MemorySpace(MemoryKind.DRAM, 0)),
        ("vram", "dram", MemorySpace(MemoryKind.DRAM, 0)),
        ("dram", "vram", MemorySpace(MemoryKind.VRAM, 3)),
        ("vram", None, MemorySpace(MemoryKind.VRAM, 3)),
        ("dram", None, MemorySpace(MemoryKind.DRAM, 0)),
    ],
)
def test_a_pool_is_where_the_peer_says_and_a_base_peers_where_ours_is(
    ours: str, theirs: str | None, found: MemorySpace
) -> None:
    base = replace(BASE, gpu_id=3)
    named = replace(PEER, gpu_id=3, extension=msgspec.structs.replace(THEIRS, kv_memory=theirs or "dram"))
    us = msgspec.structs.replace(OURS, kv_memory=ours)
    registration = base if theirs is None else named
    assert only(destination_of(registration, us, handoff=HANDOFF)).kv_space == found


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [
        (("", ""), ("", ""), None),
        (("sql", "d1"), ("sql", "d1"), None),
        (("mine", "d1"), ("yours", "d1"), None),
        (("sql", "d1"), ("sql", "d2"), r"goes on with adapter 'sql' \(d1\), .* with adapter 'sql' \(d2\)"),
        (("sql", "d1"), ("", ""), r"goes on with adapter 'sql' \(d1\), the prompt is computed with the base model"),
        (("", ""), ("sql", "d1"), r"goes on with the base model, the prompt is computed with adapter 'sql' \(d1\)"),
        (None, ("", ""), None),
        (None, ("sql", "d1"), "goes on with no adapter that it could name"),
    ],
)
def test_kv_of_another_adapter_is_refused(
    theirs: tuple[str, str] | None, ours: tuple[str, str], text: str | None
) -> None:
    info = asked([1], is_base=theirs is None)
    if theirs is not None:
        extension = RoomExtension(instance_id="d", adapter=theirs[0], adapter_digest=theirs[1])
        info = replace(info, extension=extension)
    request = Request(
        request_id="r", prompt_token_ids=[1], sampling=SamplingParams(), adapter=ours[0], adapter_digest=ours[1]
    )
    problem = adapter_problem(info, request)
    assert (problem is None) if text is None else re.search(text, problem or "")
