"""What a group of ranks promises, checked in worlds of one to four real processes, over shared memory and over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from collective_world import RankWorld
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.kernels.library import kernels

WORLDS = [(1, "shm"), (2, "shm"), (3, "shm"), (4, "shm"), (2, "gloo"), (3, "gloo")]
SHM_WORLDS = [world for world in WORLDS if world[1] == "shm" and world[0] > 1]

several = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4)
large_shapes = st.sampled_from([[257, 131], [1, 200_000], [513, 300], [70_001], [4, 5, 6, 700]])
floats = st.sampled_from(["bfloat16", "float16", "float32"])
seeds = st.integers(0, 50)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def started() -> Iterator[dict[tuple[int, str], RankWorld]]:
    """The worlds in use, each started once."""
    worlds: dict[tuple[int, str], RankWorld] = {}
    yield worlds
    for world in worlds.values():
        assert world.close() == [0] * world.size


@pytest.fixture(scope="module", params=WORLDS, ids=lambda param: f"{param[1]}-{param[0]}")
def world(request: pytest.FixtureRequest, started: dict[tuple[int, str], RankWorld]) -> RankWorld:
    return world_of(request.param, started)


@pytest.fixture(scope="module", params=SHM_WORLDS, ids=lambda param: f"{param[1]}-{param[0]}")
def shm_world(request: pytest.FixtureRequest, started: dict[tuple[int, str], RankWorld]) -> RankWorld:
    if kernels() is None:
        pytest.skip("no C++ compiler: there are no kernels")
    return world_of(request.param, started)


def world_of(which: tuple[int, str], started: dict[tuple[int, str], RankWorld]) -> RankWorld:
    if which not in started:
        started[which] = RankWorld(which[0], carrier=which[1])
    return started[which]


def exact(world: RankWorld, what: str, **arguments: object) -> list[str]:
    """Asks all ranks; every answer must be right to the bit. Their digests."""
    answers = world.ask(what, **arguments)
    assert all(answer.get("is_exact") for answer in answers), answers
    return [str(answer.get("digest")) for answer in answers]


def test_shared_memory_carries_what_it_should(shm_world: RankWorld) -> None:
    assert [answer["shm"] for answer in shm_world.ask("carried_by")] == [True] * shm_world.size


@several
@given(shape=st.one_of(shapes, large_shapes), dtype=floats, seed=seeds)
def test_all_reduce_is_the_float32_sum_in_rank_order(
    shm_world: RankWorld, shape: list[int], dtype: str, seed: int
) -> None:
    digests = exact(shm_world, "all_reduce", shape=shape, dtype=dtype, seed=seed)
    assert len(set(digests)) == 1


@several
@given(shape=shapes, dtype=floats, seed=seeds)
def test_all_reduce_is_close_whatever_carries_it(world: RankWorld, shape: list[int], dtype: str, seed: int) -> None:
    """gloo rounds after each addition."""
    answers = world.ask("all_reduce", shape=shape, dtype=dtype, seed=seed)
    assert all(answer["error"] <= {"bfloat16": 8.0, "float16": 1.0, "float32": 1e-3}[dtype] for answer in answers)


@several
@given(shape=st.one_of(shapes, large_shapes), dtype=st.sampled_from(["bfloat16", "float32", "int64"]), data=st.data())
def test_all_gather_joins_along_any_dim(world: RankWorld, shape: list[int], dtype: str, data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    assert len(set(exact(world, "all_gather", shape=shape, dtype=dtype, seed=data.draw(seeds), dim=dim))) == 1


@several
@given(shape=shapes, dtype=floats, data=st.data())
def test_reduce_scatter_gives_each_its_share(
    shm_world: RankWorld, shape: list[int], dtype: str, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= shm_world.size
    if 0 not in shape:
        exact(shm_world, "reduce_scatter", shape=shape, dtype=dtype, seed=data.draw(seeds), dim=dim)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reduce_scatter_over_float32_whatever_carries_it(world: RankWorld, dim: int) -> None:
    answers = world.ask("reduce_scatter", shape=[12, 24, 12], dtype="float32", seed=1, dim=dim)
    assert all(answer["error"] <= 1e-3 for answer in answers)


def test_a_dim_that_ranks_cannot_share_is_refused(world: RankWorld) -> None:
    if world.size == 1:
        pytest.skip("one rank takes everything")
    answers = world.ask("reduce_scatter", shape=[2, 13], dtype="float32", seed=1, dim=1)
    assert [answer["raised"] for answer in answers] == ["ValueError"] * world.size
    assert f"dim 1 of (2, 13) cannot be dealt to {world.size} ranks" in str(answers[0]["message"])


def test_transposed_tensors_are_summed_as_they_look(world: RankWorld) -> None:
    answers = world.ask("all_reduce", shape=[6, 5], dtype="float32", seed=3, transpose=True)
    assert all(answer["error"] <= 1e-3 for answer in answers)


def test_broadcast_from_every_rank(world: RankWorld) -> None:
    for src in range(world.size):
        exact(world, "broadcast", shape=[3, 5], dtype="bfloat16", seed=4, src=src)


@pytest.mark.parametrize("shape", [[3, 5], [400, 700], [0, 4]])
def test_a_ring_of_sends(world: RankWorld, shape: list[int]) -> None:
    if world.size == 1:
        pytest.skip("nobody to send to")
    exact(world, "ring", shape=shape, dtype="bfloat16", seed=5)


def test_a_tensor_dict_with_values_and_empty_tensors(world: RankWorld) -> None:
    if world.size == 1:
        pytest.skip("nobody to send to")
    exact(world, "tensor_dict", seed=6)


def test_objects_are_typed(world: RankWorld) -> None:
    if world.size == 1:
        pytest.skip("nobody to send to")
    value = {"name": "p", "values": list(range(1000))}
    for kind in ("point", "ints"):
        world.begin(1, "recv_object", src=0, kind=kind)
        world.begin(0, "send_object", dst=1, value=value)
        assert "raised" not in world.answer(0)
        answer = world.answer(1)
        if kind == "point":
            assert answer["value"] == value
        else:
            assert answer["raised"] == "InvariantError"
            assert "rank 0 sent an object that is no list[int]" in str(answer["message"])


def test_other_dtypes_are_summed_by_gloo(world: RankWorld) -> None:
    exact(world, "all_reduce", shape=[50], dtype="int64", seed=9)


def test_one_rank_without_kernels_and_all_use_gloo() -> None:
    with ExitStack() as stack:
        world = RankWorld(2, without_kernels=1)
        stack.callback(world.close)
        assert [answer["shm"] for answer in world.ask("carried_by")] == [False, False]
        exact(world, "all_reduce", shape=[5, 7], dtype="float32", seed=1)
        assert [answer["mapped"] for answer in world.ask("open_files")] == [0, 0]


def test_a_sender_who_claims_to_be_another_is_found_out() -> None:
    with ExitStack() as stack:
        world = RankWorld(3, carrier="gloo")
        stack.callback(world.close)
        world.begin(1, "recv_object", src=0, kind="ints")
        world.begin(0, "claim_to_be", claimed=2)
        answer = world.answer(1)
        assert answer["raised"] == "InvariantError"
        assert "from rank 2 for rank 1 arrived where rank 1 awaits one from rank 0" in str(answer["message"])


def test_wrong_ranks_are_named(world: RankWorld) -> None:
    for answer in world.ask("recv_object", src=9, kind="ints") + world.ask(
        "broadcast", shape=[1], dtype="float32", seed=0, src=-1
    ):
        assert answer["raised"] == "ValueError"
        assert "is not in the tensor group, whose ranks are 0 to" in str(answer["message"])


def test_nobody_passes_a_barrier_before_the_last_has_come(world: RankWorld) -> None:
    answers = world.ask("barrier", pause_s=0.1)
    first, last = (pick(float(answer["now"]) for answer in answers) for pick in (min, max))  # type: ignore[arg-type]
    assert last - first < 0.09 or world.size == 1


def test_compiled_graphs_keep_the_collectives(started: dict[tuple[int, str], RankWorld]) -> None:
    for answer in world_of((2, "shm"), started).ask("compiled", seed=7):
        assert answer.get("is_exact"), answer
        assert answer["called"] == ["diptych.all_reduce", "diptych.all_gather", "diptych.reduce_scatter"]


@pytest.mark.parametrize("carrier", ["shm", "gloo"])
def test_pipeline_stages_send_each_slice_once(carrier: str) -> None:
    with ExitStack() as stack:
        world = RankWorld(4, carrier=carrier, pp=2)
        stack.callback(world.close)
        exact(world, "sliced_tensor_dict", seed=8)
