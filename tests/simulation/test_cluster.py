"""Thousands of schedules of a whole cluster: whatever happens, answers are right, everyone is answered, nothing is
lost.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from cluster import Cluster, Weather

from diptych.core.batch import FinishReason
from diptych.transfer.loopback import Faults

# More for a night run: DIPTYCH_SIMULATION_SEEDS=5000.
NUM_SEEDS = int(os.environ.get("DIPTYCH_SIMULATION_SEEDS", "60"))

CALM = Weather()
LAGGING = Weather(max_delay=0.3, write_faults=Faults(max_delay_s=0.3))
LOSSY = Weather(
    drop_frame=0.1,
    write_faults=Faults(max_delay_s=0.05, drop_notification=0.05, duplicate_notification=0.1, fail_write=0.05),
)
IMPATIENT = Weather(cancel=0.5, max_delay=0.05, write_faults=Faults(max_delay_s=0.2))
DEADLY = Weather(num_kills=4, cancel=0.1, write_faults=Faults(max_delay_s=0.1))
FREEZING = Weather(num_freezes=3, cancel=0.1, write_faults=Faults(max_delay_s=0.1))
STRANGE = Weather(num_strangers=1, num_freezes=1, cancel=0.2, write_faults=Faults(max_delay_s=0.1))
STORM = Weather(
    max_delay=0.1,
    drop_frame=0.05,
    num_kills=3,
    num_freezes=3,
    cancel=0.2,
    write_faults=Faults(max_delay_s=0.2, drop_notification=0.05, duplicate_notification=0.1, fail_write=0.05),
)
SHAPES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 3), (1, 3))
SPREAD = replace(LOSSY, shapes=SHAPES, cancel=0.2)
SPREAD_STORM = replace(STORM, shapes=SHAPES, max_linger=1.5)
WEATHERS = {
    "calm": CALM,
    "lagging": LAGGING,
    "lossy": LOSSY,
    "impatient": IMPATIENT,
    "deadly": DEADLY,
    "freezing": FREEZING,
    "strange": STRANGE,
    "storm": STORM,
    "spread": SPREAD,
    "spread storm": SPREAD_STORM,
}


@pytest.mark.parametrize("name", WEATHERS)
def test_whatever_the_weather(name: str) -> None:
    for seed in range(NUM_SEEDS):
        cluster = Cluster(seed, WEATHERS[name])
        try:
            cluster.run(num_requests=12)
            cluster.check_answers()
            for engine in cluster.engines.values():
                assert engine.cache.num_owned == 0, "pages are still in quarantine after the calm"
                assert engine.scheduler.flush_cache()
        except Exception as error:
            raise AssertionError(f"seed {seed} of {name}: {error}; {cluster.describe()}") from error


def test_calm_weather_serves_everyone_by_transfer() -> None:
    cluster = Cluster(1, CALM)
    cluster.run(num_requests=20)
    clients = cluster.clients.values()
    assert all(client.reason in (FinishReason.STOP, FinishReason.LENGTH) for client in clients)
    assert sum(engine.hinge.sender.num_done for engine in cluster.engines.values()) >= 15
    decoding = [engine for name, engine in cluster.engines.items() if name.startswith("d")]
    assert sum(engine.hinge.receiver.failures.total() for engine in decoding) == 0


def test_answers_come_within_seconds_of_a_death() -> None:
    for seed in range(NUM_SEEDS):
        cluster = Cluster(seed, Weather(num_kills=3))
        cluster.run(num_requests=10)
        slowest = max(c.ended_at - c.sent_at for c in cluster.clients.values() if c.ended_at is not None)
        assert slowest < 5.0, f"seed {seed}: a request took {slowest:.1f} s; {cluster.trace}"


def test_a_seed_replays() -> None:
    runs = []
    for _ in range(2):
        cluster = Cluster(3, STORM)
        cluster.run(num_requests=12)
        runs.append((cluster.now, cluster.trace, [client.tokens for client in cluster.clients.values()]))
    assert runs[0] == runs[1]
