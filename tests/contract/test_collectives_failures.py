"""Ranks that die, stop, leave or disagree: an error that names them within seconds, and nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from collective_world import Answer, RankWorld

from diptych.errors import RankLost
from diptych.kernels.library import kernels
from diptych.parallel.mesh import Mesh, MeshSizes, Placement
from diptych.parallel.world import World, WorldOptions

SECONDS = 6.0
"""What "within seconds" means here, on a machine that is busy."""

pytestmark = pytest.mark.timeout(120)

Open = Callable[..., RankWorld]


@pytest.fixture
def open_world() -> Iterator[Open]:
    """Starts worlds and ends what is left of them; nothing may be left in /dev/shm then."""
    if kernels() is None:
        pytest.skip("no C++ compiler: there are no kernels")
    worlds = []

    def start(size: int, **arguments: object) -> RankWorld:
        worlds.append(RankWorld(size, **arguments))  # type: ignore[arg-type]
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()
        assert not [pid for pid in world.pids if Path(f"/proc/{pid}").exists()]
    assert not [name for name in os.listdir("/dev/shm") if "diptych" in name]


def assert_lost(answer: Answer, *words: str) -> None:
    assert answer.get("raised") == "RankLost", answer
    assert all(word in str(answer["message"]) for word in words), answer
    assert float(str(answer["took_s"])) < SECONDS


def test_a_killed_rank_is_named(open_world: Open) -> None:
    world = open_world(3)
    for rank in (0, 1):
        world.begin(rank, "all_reduce", shape=[1000], dtype="float32", seed=1)
    time.sleep(0.2)
    world.kill(2)
    for rank in (0, 1):
        assert_lost(world.answer(rank), "all_reduce of 3 ranks: rank 2 is dead; the engine must be restarted")


def test_a_rank_killed_amid_many_collectives(open_world: Open) -> None:
    world = open_world(3)
    for rank in range(3):
        world.begin(rank, "latency", nbytes=1 << 20, count=1_000_000)
    time.sleep(1.0)
    world.kill(1)
    killed = time.monotonic()
    for rank in (0, 2):
        answer = world.answer(rank)
        assert time.monotonic() - killed < SECONDS
        assert answer["raised"] == "RankLost"
        assert "rank 1 is dead" in str(answer["message"])


def test_a_stopped_rank_is_named(open_world: Open) -> None:
    world = open_world(3)
    world.stop(1)
    for rank in (0, 2):
        world.begin(rank, "barrier", pause_s=0)
    for rank in (0, 2):
        assert_lost(world.answer(rank), "barrier of 3 ranks: rank 1 is stopped (SIGSTOP?)")


def test_a_rank_that_is_stopped_for_a_moment_is_waited_for(open_world: Open) -> None:
    world = open_world(2)
    world.stop(1)
    for rank in (0, 1):
        world.begin(rank, "all_reduce", shape=[1000], dtype="float32", seed=1)
    time.sleep(0.4)
    world.resume(1)
    assert all(world.answer(rank).get("is_exact") for rank in (0, 1))


def test_a_group_is_of_no_more_use_after_a_loss(open_world: Open) -> None:
    world = open_world(2)
    world.kill(1)
    world.begin(0, "barrier", pause_s=0)
    assert_lost(world.answer(0), "rank 1 is dead")
    world.begin(0, "all_gather", shape=[4], dtype="float32", seed=1, dim=0)
    again = world.answer(0)
    assert_lost(again, "all_gather of 2 ranks: rank 1 is dead")
    assert float(str(again["took_s"])) < 0.1


def test_a_live_rank_that_does_not_come_is_named_when_time_is_up(open_world: Open) -> None:
    world = open_world(2, timeout_s=1.5)
    world.begin(0, "barrier", pause_s=0)
    assert_lost(world.answer(0), "barrier of 2 ranks: rank 1 did not come within 2 s")


def test_ranks_in_unlike_collectives_are_told(open_world: Open) -> None:
    world = open_world(2)
    world.begin(0, "all_reduce", shape=[4], dtype="float32", seed=1)
    world.begin(1, "all_reduce", shape=[4], dtype="bfloat16", seed=1)
    for rank in (0, 1):
        assert_lost(world.answer(rank), "is in another collective, or in one of another size or dtype")


def test_a_rank_that_leaves_is_named(open_world: Open) -> None:
    world = open_world(2)
    world.begin(0, "barrier", pause_s=0)
    world.begin(1, "close")
    assert_lost(world.answer(0), "rank 1 has left the group")


def test_over_gloo_a_killed_rank_is_an_error_as_well(open_world: Open) -> None:
    world = open_world(2, carrier="gloo")
    world.begin(0, "all_reduce", shape=[1000], dtype="float32", seed=1)
    time.sleep(0.2)
    world.kill(1)
    assert_lost(world.answer(0), "all_reduce in the tensor group failed, the engine must be restarted")


def test_over_gloo_a_barrier_has_an_end(open_world: Open) -> None:
    world = open_world(2, carrier="gloo", timeout_s=1.5)
    world.stop(1)
    world.begin(0, "barrier", pause_s=0)
    assert_lost(world.answer(0), "barrier in the tensor group failed")


def test_nothing_is_open_and_one_segment_is_mapped(open_world: Open) -> None:
    world = open_world(2)
    for answer in world.ask("open_files"):
        assert (answer["open"], answer["mapped"]) == ([], 1)
    world.ask("close")
    for answer in world.ask("open_files"):
        assert (answer["open"], answer["mapped"]) == ([], 0)


def test_a_collective_after_closing_is_refused(open_world: Open) -> None:
    world = open_world(2)
    world.ask("close")
    for answer in world.ask("barrier", pause_s=0):
        assert answer["raised"] == "InvariantError"
        assert "the tensor group of 2 ranks is closed" in str(answer["message"])


def test_a_rank_whom_nobody_meets_says_where_it_waited(tmp_path: Path) -> None:
    options = WorldOptions(init_method=f"file://{tmp_path}/meeting", timeout_s=1)
    with pytest.raises(RankLost, match=r"rank 0 of 2 did not meet the others at file:///.*/meeting within 1 s"):
        World(Mesh(sizes=MeshSizes(tp=2), rank=0), Placement(world=2), device=torch.device("cpu"), options=options)


def test_a_rank_that_dies_opening_the_segment_ends_the_others(
    open_world: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EOFError, match="rank 0 has ended with 1"):
        open_world(2, timeout_s=3.0, carrier="shm-dies")
    assert "RankLost: rank 0 could not open its groups, another may have ended" in capfd.readouterr().err
