"""The doctor reports whatever is there, and survives what is not."""

from __future__ import annotations

import json

import pytest

from diptych.cli import doctor
from diptych.cli.main import main
from diptych.errors import ConfigError


def test_json_has_every_section(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["section"] for finding in findings} == {"versions", "cpu", "memory", "gpu", "nixl", "choices"}
    assert all(finding["mark"] in ("ok", "warn", "info") for finding in findings)
    assert {f["name"] for f in findings if f["section"] == "choices"} >= {"device", "dtype", "KV pool"}


def test_table_has_a_line_a_finding(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(f"{finding.name} " in out for finding in doctor.examine())


def test_nothing_installed_is_only_a_report(monkeypatch):
    monkeypatch.setattr(doctor, "_import_if_there", lambda name: None)
    monkeypatch.setattr(doctor, "_installed_version", lambda package: None)
    marks = {finding.name: finding.mark for finding in doctor.examine()}
    assert marks["torch"] == "warn"
    assert marks["CUDA"] == "warn"
    assert marks["device"] == "warn"
    assert marks["flashinfer-python"] == "info"


def test_a_broken_nixl_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_installed_version", lambda package: "1.0" if package == "nixl-cu12" else None)

    def broken(name):
        raise RuntimeError(f"{name}: libcuda.so.1 not found")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    installed, failed = doctor._nixl()
    assert installed.value == "nixl-cu12 1.0"
    assert (failed.mark, failed.value) == ("warn", "fails")
    assert "libcuda.so.1 not found" in failed.note


def test_unknown_flags_are_refused():
    with pytest.raises(ConfigError, match="unknown flag --jsn; did you mean --json"):
        doctor.run(["--jsn"])
