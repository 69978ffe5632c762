"""Loading, the choice of an instruction set, and the thread pool."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

from diptych.errors import ConfigError
from diptych.kernels import build
from diptych.kernels.library import Kernels, kernels, set_num_threads
from diptych.kernels.linear import PackedLinear


@pytest.fixture
def fresh_load():
    """`kernels()` decides anew in this test, and once more after it."""
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@pytest.mark.usefixtures("fresh_load")
def test_without_a_compiler_torch_computes_and_one_warning_says_so(monkeypatch, caplog, cache_dir) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert kernels() is None
        assert kernels() is None
    (record,) = caplog.records
    assert "no C++ compiler was found (looked for no-such-compiler)" in record.getMessage()


@pytest.mark.usefixtures("fresh_load")
def test_they_can_be_switched_off(monkeypatch) -> None:
    monkeypatch.setenv("DIPTYCH_KERNELS", "off")
    assert kernels() is None


@pytest.mark.usefixtures("fresh_load", "library")
def test_a_set_can_be_chosen_and_must_exist(monkeypatch) -> None:
    monkeypatch.setenv("DIPTYCH_KERNELS", "portable")
    chosen = kernels()
    assert chosen is not None
    assert chosen.instruction_set == "portable"
    kernels.cache_clear()
    monkeypatch.setenv("DIPTYCH_KERNELS", "altivec")
    with pytest.raises(ConfigError, match="'altivec', which cannot run here"):
        kernels()


@pytest.mark.usefixtures("library")
def test_a_compiler_that_fails_is_reported_in_one_line(monkeypatch, cache_dir, tmp_path) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    with pytest.raises(build.BuildError, match="broken-compiler failed: fatal error: no luck"):
        build.kernel_library()


def test_results_do_not_depend_on_the_number_of_threads(library: Kernels) -> None:
    layer, x = PackedLinear(torch.randn(512, 256).bfloat16()), torch.randn(37, 256).bfloat16()
    before, results = library.num_threads(), []
    for count in (1, 2, 5, 3):
        set_num_threads(count)
        assert library.num_threads() == count
        results.append(layer(x))
    set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_many_callers_and_many_jobs(library: Kernels) -> None:
    """Callers take turns; no job is lost, and none runs twice."""
    layer, x = PackedLinear(torch.randn(256, 64).bfloat16()), torch.randn(3, 64).bfloat16()
    before, expected, wrong = library.num_threads(), layer(x), []
    set_num_threads(4)

    def call() -> None:
        for _ in range(300):
            if not torch.equal(layer(x), expected):
                wrong.append(threading.current_thread().name)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    set_num_threads(before)
    assert wrong == []


@pytest.mark.usefixtures("library")
def test_helpers_can_be_pinned_and_a_fork_works() -> None:
    code = """
import os, torch
from diptych.kernels.library import kernels, set_num_threads
from diptych.kernels.linear import PackedLinear
cpu = min(os.sched_getaffinity(0))
set_num_threads(2, cpus=[cpu, cpu])
layer, x = PackedLinear(torch.randn(512, 64).bfloat16()), torch.randn(3, 64).bfloat16()
expected = layer(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60, env=os.environ)
