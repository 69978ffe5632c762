"""A world of one, ranks that do not exist, and groups by name; more ranks are in tests/contract."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from diptych.errors import InvariantError
from diptych.parallel import ops
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.mesh import Axis, Mesh, MeshSizes, Placement
from diptych.parallel.world import World, WorldOptions


@pytest.fixture
def alone() -> GroupCoordinator:
    return GroupCoordinator("tensor", ranks=[0], rank=0)


def test_a_world_of_one_makes_no_process_group_and_returns_its_input() -> None:
    mesh = Mesh(sizes=MeshSizes(), rank=0)
    with World(mesh, Placement(world=1), device=torch.device("cpu"), options=WorldOptions()) as world:
        assert not dist.is_initialized()
        x = torch.randn(4, 6)
        for axis in Axis:
            group = world.group(axis)
            assert (group.size, group.is_first, group.is_last) == (1, True, True)
            assert group.all_reduce(x) is x
            assert group.all_gather(x, 0) is x
            assert group.reduce_scatter(x, 1) is x
            assert group.broadcast(x) is x
            group.barrier()


def test_a_compiled_graph_of_one_rank_has_no_collective(alone: GroupCoordinator) -> None:
    targets = []

    def keep(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda x: alone.all_gather(alone.all_reduce(x + 1), 0), backend=keep, fullgraph=True)
    assert torch.equal(compiled(torch.zeros(3)), torch.ones(3))
    assert not [target for target in targets if "diptych" in target]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_does_not_exist_is_named(alone: GroupCoordinator, dim: int) -> None:
    with pytest.raises(ValueError, match=rf"dim {dim} does not exist in a tensor of shape \(2, 3\)"):
        alone.all_gather(torch.zeros(2, 3), dim)
    with pytest.raises(ValueError, match=f"dim {dim}"):
        alone.reduce_scatter(torch.zeros(2, 3), dim)


@pytest.mark.parametrize("rank", [1, -1])
def test_a_rank_that_does_not_exist_is_named(alone: GroupCoordinator, rank: int) -> None:
    message = f"{rank} is not in the tensor group, whose ranks are 0 to 0"
    with pytest.raises(ValueError, match=f"dst {message}"):
        alone.send(torch.zeros(1), rank)
    with pytest.raises(ValueError, match=f"dst {message}"):
        alone.send_object(1, rank)
    with pytest.raises(ValueError, match=f"dst {message}"):
        alone.send_tensor_dict({}, rank)
    with pytest.raises(ValueError, match=f"src {message}"):
        alone.recv([1], torch.float32, src=rank)
    with pytest.raises(ValueError, match=f"src {message}"):
        alone.recv_object(int, rank)
    with pytest.raises(ValueError, match=f"src {message}"):
        alone.recv_tensor_dict(rank)
    with pytest.raises(ValueError, match=f"src {message}"):
        alone.broadcast(torch.zeros(1), rank)


def test_nobody_sends_to_himself(alone: GroupCoordinator) -> None:
    with pytest.raises(ValueError, match="dst 0 is this rank itself in the tensor group"):
        alone.send(torch.zeros(1))
    with pytest.raises(ValueError, match="src 0 is this rank itself"):
        alone.recv_object(int)


def test_a_seat_must_be_in_the_group() -> None:
    with pytest.raises(ValueError, match="rank 2 is not in the tensor group, which has 2 ranks"):
        GroupCoordinator("tensor", ranks=[4, 5], rank=2)
    with pytest.raises(ValueError, match="carriers are for more than one, and then needed"):
        GroupCoordinator("tensor", ranks=[4, 5], rank=1)


class Doubling:
    """A group of two ranks that hold the same."""

    size = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x, x], dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.mul_(2).chunk(2, dim)[0].contiguous()


@pytest.fixture
def doubling():
    ops.enter("doubling", Doubling())
    yield
    ops.leave("doubling")


@pytest.mark.usefixtures("doubling")
def test_ops_keep_their_input_and_know_their_shapes() -> None:
    x = torch.arange(8.0).view(4, 2)
    kept = x.clone()
    for op, arguments, shape in [
        (torch.ops.diptych.all_reduce, (), (4, 2)),
        (torch.ops.diptych.all_gather, (1,), (4, 4)),
        (torch.ops.diptych.reduce_scatter, (0,), (2, 2)),
    ]:
        assert op(x, *arguments, "doubling").shape == shape
        assert torch.equal(x, kept)
        torch.library.opcheck(op, (x, *arguments, "doubling"), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("doubling")
def test_a_name_is_taken_once_and_unknown_ones_are_named() -> None:
    with pytest.raises(InvariantError, match="there is a group 'doubling' already"):
        ops.enter("doubling", Doubling())
    with pytest.raises(InvariantError, match="uses the group 'gone'"):
        torch.ops.diptych.all_reduce(torch.zeros(1), "gone")
