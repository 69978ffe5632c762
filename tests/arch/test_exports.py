"""The public names of the package, each of which must load."""

from __future__ import annotations

import importlib.metadata
from importlib.resources import files

import pytest

import diptych

EXPORTS = [
    "LLM",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "FlattenedBucket",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "ServerConfig",
    "WeightsGroup",
    "__version__",
]


def test_exports_are_the_frozen_ones():
    assert diptych.__all__ == EXPORTS


@pytest.mark.parametrize("name", EXPORTS)
def test_export_loads(name):
    assert vars(diptych).get(name) or diptych.__getattr__(name)
    assert name in dir(diptych)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        diptych.__getattr__("Enigne")


def test_version_is_the_installed_one():
    assert importlib.metadata.version("diptych") == diptych.__version__


def test_package_is_typed():
    assert files("diptych").joinpath("py.typed").is_file()
