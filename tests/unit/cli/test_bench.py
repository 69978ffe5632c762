"""The flags of `diptych bench`: which cases they make, and what is refused before anything is loaded."""

from __future__ import annotations

import sys

import pytest

from diptych.bench.workload import Vocabulary
from diptych.cli import bench
from diptych.cli import main as cli
from diptych.errors import ConfigError

VOCABULARY = Vocabulary(2000, ())


def test_the_overview_lists_every_benchmark(capsys):
    assert bench.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in bench.SUBCOMMANDS)
    assert bench.run([]) == cli.EXIT_USAGE


def test_unknown_benchmarks_name_the_nearest():
    with pytest.raises(ConfigError, match="unknown benchmark 'ofline'; did you mean 'offline'"):
        bench.run(["ofline"])


@pytest.mark.parametrize("name", ["offline", "serve"])
def test_help_has_the_workload(name, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.run([name, "--help"])
    assert not stop.value.code
    out = capsys.readouterr().out
    assert "--shared-prefix-len" in out
    assert ("--max-num-seqs" in out) == (name == "offline")


def test_flags_make_synthetic_requests():
    flags = bench.WorkloadFlags(num_prompts=3, input_len="4:6", output_len="2", shared_prefix_len=10)
    (case,) = bench.build_cases(flags, lambda: VOCABULARY, 5)
    assert len(case.requests) == 3
    assert all(14 <= len(request.prompt) <= 16 and request.max_tokens == 2 for request in case.requests)
    assert bench.build_cases(flags, lambda: VOCABULARY, 5) == [case]


def test_a_dataset_needs_no_vocabulary(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * 3)

    def no_vocabulary():
        raise AssertionError("asked for a vocabulary")

    (case,) = bench.build_cases(bench.WorkloadFlags(dataset=path, num_prompts=2), no_vocabulary, 0)
    assert (case.name, len(case.requests), case.requests[0].max_tokens) == ("rows", 2, 128)


def test_presets_can_be_cut_down():
    flags = bench.WorkloadFlags(preset="cpu", cases="decode_32")
    assert [case.name for case in bench.build_cases(flags, lambda: VOCABULARY, 0)] == ["decode_32"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"preset": "cpu", "dataset": "x"}, "--preset and --dataset exclude each other"),
        ({"cases": "decode_32"}, "--cases chooses from a preset"),
        ({"input_len": "9:1"}, "--input-len must be"),
        ({"output_len": "x"}, "--output-len must be"),
        ({"warmup": -1}, "--warmup must not be negative"),
    ],
)
def test_contradictions_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        bench.build_cases(bench.WorkloadFlags(**flags), lambda: VOCABULARY, 0)


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_an_unwritable_output_is_refused_before_anything_is_loaded(flag, tmp_path, capsys):
    assert cli.main(["bench", "offline", "demo", flag, str(tmp_path / "missing" / "out")]) == cli.EXIT_USAGE
    assert "its folder does not exist" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "diptych.bench.serve", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == cli.EXIT_USAGE
    assert "this needs aiohttp: pip install 'diptych[bench]'" in capsys.readouterr().err


def test_no_server_exits_with_1(capsys):
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == cli.EXIT_FAILED
    assert "no server answers" in capsys.readouterr().err


def test_secrets_stay_out_of_the_document():
    from diptych.config import EngineConfig, ServerConfig

    config = bench._without_secrets(EngineConfig(server=ServerConfig(api_key="secret")))
    assert "secret" not in str(config)
    assert config["cache"]["page_size"] == 16
