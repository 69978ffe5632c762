"""The one log line about a room."""

from __future__ import annotations

from diptych.transfer.stages import Stage, Stages


def test_a_room_that_was_handed_over() -> None:
    stages = Stages(10.0)
    stages.reach(Stage.MET, 10.001)
    stages.reach(Stage.FIRST_WRITE, 10.05)
    stages.reach(Stage.FIRST_WRITE, 10.06)
    stages.reach(Stage.FIRST_TOKEN, 10.1)
    for _ in range(2):
        stages.add_write(1_000_000, 3, 0.001)
    assert stages.line(7, "done", 10.11) == (
        "room=7 outcome=done room_wait_ms=1.0 first_write_ms=50.0 first_token_ms=100.0 transfer_ms=60.0 total_ms=110.0"
        " bytes=2000000 descriptors=6 gb_s=1"
    )


def test_what_was_never_reached_is_not_said() -> None:
    stages = Stages(10.0, queue_s=0.25)
    assert stages.line(7, "peer_lost", 12.0) == "room=7 outcome=peer_lost queue_ms=250.0 total_ms=2000.0"
