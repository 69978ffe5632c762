"""The flags and the plan of `diptych bench pd`; the measurement itself starts real engines (tests/e2e)."""

from __future__ import annotations

import pytest

from diptych.cli import bench_pd
from diptych.config import EngineConfig, ModelConfig
from diptych.errors import ConfigError


def test_wrong_lengths_are_refused():
    for wrong in ("", "0", "16,", "a"):
        with pytest.raises(ConfigError, match="--input-lens"):
            bench_pd.run(["--input-lens", wrong])
    with pytest.raises(ConfigError, match="--output-len"):
        bench_pd.run(["--output-len", "2"])


def test_all_engines_compute_alike():
    plans = bench_pd._plans(EngineConfig(model=ModelConfig(num_threads=3)))
    assert [plan.config.transfer.role for plan in plans] == ["unified", "prefill", "decode"]
    assert {plan.config.model.num_threads for plan in plans} == {3}
    assert {plan.config.cache.mem_sharers for plan in plans} == {3}
    assert {plan.config.server.port for plan in plans} == {0}
