"""The groups of every axis, and where ranks run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.env import LeaderWorkerSet
from diptych.errors import ConfigError
from diptych.parallel.mesh import Axis, Mesh, MeshSizes, Placement, axis_groups, place

PAIRS = [
    (Axis.TENSOR, Axis.PIPELINE, Axis.WORLD),
    (Axis.DATA, Axis.ATTENTION, Axis.TENSOR),
    (Axis.EXPERT, Axis.EXPERT_SLICE, Axis.TENSOR),
]
"""Two axes that span a third."""


@st.composite
def any_sizes(draw: st.DrawFn) -> MeshSizes:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    divisors = st.sampled_from([size for size in range(1, tp + 1) if tp % size == 0])
    return MeshSizes(tp=tp, pp=draw(st.integers(1, 4)), dp=draw(divisors), ep=draw(divisors))


@given(any_sizes())
def test_each_axis_deals_every_rank_to_one_group(sizes: MeshSizes) -> None:
    for axis in Axis:
        groups = axis_groups(sizes, axis)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(sizes.world))
        assert all(list(ranks) == sorted(ranks) for ranks in groups)
        assert len({len(ranks) for ranks in groups}) == 1


@given(any_sizes())
def test_axes_have_their_sizes(sizes: MeshSizes) -> None:
    expected = {
        Axis.WORLD: sizes.tp * sizes.pp,
        Axis.TENSOR: sizes.tp,
        Axis.PIPELINE: sizes.pp,
        Axis.DATA: sizes.dp,
        Axis.ATTENTION: sizes.tp // sizes.dp,
        Axis.EXPERT: sizes.ep,
        Axis.EXPERT_SLICE: sizes.tp // sizes.ep,
    }
    mesh = Mesh(sizes=sizes, rank=sizes.world - 1)
    assert {axis: mesh.axis_size(axis) for axis in Axis} == expected


@given(any_sizes(), st.data())
def test_two_axes_span_a_third_and_meet_in_one_rank(sizes: MeshSizes, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, sizes.world - 1))
    mesh = Mesh(sizes=sizes, rank=rank)
    for first, second, whole in PAIRS:
        assert set(mesh.group(first)) & set(mesh.group(second)) == {rank}
        spanned = {found for other in mesh.group(first) for found in Mesh(sizes=sizes, rank=other).group(second)}
        assert spanned == set(mesh.group(whole))


@given(any_sizes(), st.data())
def test_a_rank_knows_its_number_and_its_stage(sizes: MeshSizes, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, sizes.world - 1))
    mesh = Mesh(sizes=sizes, rank=rank)
    assert all(mesh.group(axis)[mesh.axis_rank(axis)] == rank for axis in Axis)
    stage, place_in_stage = mesh.axis_rank(Axis.PIPELINE), mesh.axis_rank(Axis.TENSOR)
    assert rank == stage * sizes.tp + place_in_stage  # the order of page transfers (transfer.plan.shards)
    assert mesh.is_first_stage == (stage == 0)
    assert mesh.is_last_stage == (stage == sizes.pp - 1)


def test_an_example() -> None:
    sizes = MeshSizes(tp=4, pp=2, dp=2, ep=4)
    assert axis_groups(sizes, Axis.TENSOR) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert axis_groups(sizes, Axis.PIPELINE) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert axis_groups(sizes, Axis.ATTENTION) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert axis_groups(sizes, Axis.DATA) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert axis_groups(sizes, Axis.EXPERT) == axis_groups(sizes, Axis.TENSOR)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp_size is 0"),
        ({"tp": 4, "dp": 3}, "dp_size 3 does not divide tp_size 4"),
        ({"tp": 2, "ep": 4}, "ep_size 4 does not divide tp_size 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeshSizes(**sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} does not exist"):
        Mesh(sizes=MeshSizes(tp=2, pp=2), rank=rank)


@given(local_size=st.integers(1, 8), nnodes=st.integers(1, 4), data=st.data())
def test_every_rank_has_one_node_and_one_device(local_size: int, nnodes: int, data: st.DataObject) -> None:
    world = local_size * nnodes
    nodes = [Placement(world=world, nnodes=nnodes, node_rank=node, init_addr="n0:1") for node in range(nnodes)]
    assert [rank for node in nodes for rank in node.local_ranks] == list(range(world))
    for node in nodes:
        assert [node.local_rank(rank) for rank in node.local_ranks] == list(range(local_size))
        assert node.is_one_node(tuple(node.local_ranks))
    ranks = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    assert nodes[0].is_one_node(tuple(ranks)) == any(ranks <= set(node.local_ranks) for node in nodes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world": 4, "nnodes": 3, "init_addr": "a:1"}, "4 ranks cannot be dealt to nnodes 3"),
        ({"world": 4, "nnodes": 2, "node_rank": 2, "init_addr": "a:1"}, "node_rank 2 is not below nnodes 2"),
        ({"world": 4, "nnodes": 2}, "2 nodes need dist_init_addr"),
    ],
)
def test_placements_that_cannot_be_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(**arguments)


def test_leader_worker_set_fills_what_is_not_said() -> None:
    group = LeaderWorkerSet("leader.pods", 2, 1)
    assert place(8, group=group) == Placement(world=8, nnodes=2, node_rank=1, init_addr="leader.pods:20000")
    assert place(8, group=group, init_addr="other:7").init_addr == "other:7"
    assert place(8, group=group, nnodes=1) == Placement(world=8)
    with pytest.raises(ConfigError, match="nnodes is 4 but LWS_GROUP_SIZE is 2"):
        place(8, group=group, nnodes=4)


def test_without_it_the_arguments_count() -> None:
    assert place(2) == Placement(world=2)
    assert place(4, nnodes=2, node_rank=1, init_addr="a:1") == Placement(
        world=4, nnodes=2, node_rank=1, init_addr="a:1"
    )
