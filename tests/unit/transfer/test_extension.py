"""What our peers tell each other: conversions and the comparison of two peers."""

from __future__ import annotations

import msgspec
import pytest

from diptych.core.request import Request, SamplingParams
from diptych.errors import ConfigError, PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.extension import LayoutFields, PeerExtension, PrefillRequest, RankFields, mismatches
from diptych.transfer.plan import shards
from diptych.transfer.ranks import Ranks

LAYOUT = KVLayout(layers=range(4, 8), kv_heads=range(2, 4), head_dim=64, page_size=16, dtype="bfloat16")
SHARDS = shards(KVLayout.single_rank(8, 4, head_dim=64, page_size=16, dtype="bfloat16"), tp_size=2, pp_size=2)
PEER = PeerExtension(
    instance_id="i",
    layout=LayoutFields.of(LAYOUT, 100),
    model_layers=8,
    model_kv_heads=4,
    model_fingerprint="qwen@1",
    tp_size=2,
    pp_size=2,
    ranks=[RankFields(layout=LayoutFields.of(part, 100), lifeline=f"h:{rank}") for rank, part in enumerate(SHARDS)],
    adapter_fingerprints={"a": "1", "b": "2"},
)


def test_a_layout_survives() -> None:
    assert PEER.layout.layout() == LAYOUT
    assert (PEER.layout.num_pages, PEER.layout.stride) == (100, LAYOUT.page_nbytes)
    with pytest.raises(ConfigError, match="int3"):
        msgspec.structs.replace(PEER.layout, dtype="int3").layout()


def test_its_ranks_are_in_order_and_each_has_a_lifeline() -> None:
    assert PEER.shape() == Ranks(tuple(SHARDS), 2, 1) and PEER.shape().layouts[3] == LAYOUT
    assert PEER.lifelines == ["h:0", "h:1", "h:2", "h:3"]


@pytest.mark.parametrize("sizes", [{"tp_size": 4}, {"pp_size": 1}, {"tp_size": 1, "pp_size": 4, "dp_size": 2}])
def test_an_engine_of_another_size_than_its_ranks_is_none(sizes: dict[str, int]) -> None:
    with pytest.raises(PeerIncompatible):
        msgspec.structs.replace(PEER, **sizes).shape()


def test_a_request_survives_and_its_deadline_is_relative() -> None:
    request = Request(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=3),
        cache_key="k",
        priority=2,
        arrival_time=5.0,
        deadline=110.0,
    )
    sent = PrefillRequest.of(request, 100.0, "trace")
    assert (sent.timeout_s, sent.trace_id) == (10.0, "trace")
    assert sent.request(2000.0) == msgspec.structs.replace(request, arrival_time=2000.0, deadline=2010.0)
    assert PrefillRequest.of(request, 200.0).timeout_s == 0.0
    without = PrefillRequest.of(msgspec.structs.replace(request, deadline=None), 100.0)
    assert without.timeout_s is None and without.request(1.0).deadline is None


@pytest.mark.parametrize(
    "field,value,text",
    [
        ("model_fingerprint", "qwen@2", "model is qwen@1 here and qwen@2 there"),
        ("model_layers", 9, "number of layers is 8 here and 9 there"),
        ("model_kv_heads", 8, "number of KV heads is 4 here and 8 there"),
        ("draft_fingerprint", "eagle", "draft model is none here and eagle there"),
        ("hidden_nbytes", 5, "size of the hidden state is 0 here and 5 there"),
        ("adapter_fingerprints", {"b": "3", "c": "4"}, "adapter 'b' is 2 here and 3 there"),
    ],
)
def test_a_mismatch_names_both_values(field: str, value: object, text: str) -> None:
    theirs = msgspec.structs.replace(PEER, **{field: value})
    assert [str(mismatch) for mismatch in mismatches(PEER, theirs)] == [text]


@pytest.mark.parametrize("field,value", [("dtype", "float32"), ("head_dim", 32)])
def test_pages_that_cannot_be_converted(field: str, value: object) -> None:
    layout = msgspec.structs.replace(PEER.layout, **{field: value})
    (found,) = mismatches(PEER, msgspec.structs.replace(PEER, layout=layout))
    assert str(found).endswith(f"here and {value} there")


def test_sharding_page_size_and_free_adapters_may_differ() -> None:
    layout = LayoutFields.of(KVLayout.single_rank(8, 4, head_dim=64, page_size=32, dtype="bfloat16"), 7)
    theirs = msgspec.structs.replace(
        PEER,
        instance_id="j",
        layout=layout,
        tp_size=1,
        pp_size=1,
        ranks=[],
        adapter_fingerprints={"z": "9"},
    )
    assert mismatches(PEER, theirs) == []
