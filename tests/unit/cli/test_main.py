"""The command's exit status and what it prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

import diptych
from diptych.cli import main as cli
from diptych.errors import WorkerError


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"diptych {diptych.__version__}\n"


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {command.name} " in out for command in cli.COMMANDS)


def test_no_command_is_an_error(capsys):
    assert cli.main([]) == cli.EXIT_USAGE
    assert "usage: diptych COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serv"], "diptych: error: unknown command 'serv'; did you mean 'serve'?"),
        (["serve", "--prot", "1"], "diptych: error: unknown flag --prot; did you mean --port?"),
        (["serve", "no/such/model"], "diptych: error: model path no/such/model does not exist; give a folder"),
        (["serve", "--page-size", "3"], "diptych: error: page_size must be a power of two from 1 to 256, got 3"),
    ],
)
def test_configuration_errors_are_one_line(arguments, line):
    done = subprocess.run([sys.executable, "-m", "diptych", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_engine_errors_exit_with_1(monkeypatch, capsys):
    def fail(arguments):
        raise WorkerError("the device\nis gone")

    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("fail", "fails", fail),))
    assert cli.main(["fail"]) == 1
    assert capsys.readouterr().err == "diptych: worker_failed: the device is gone\n"


def test_ctrl_c_exits_with_130(monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("wait", "waits", interrupt),))
    assert cli.main(["wait"]) == 130


def test_a_closed_pipe_is_quiet():
    code = "import sys; from diptych.cli.main import main; sys.stdin.read(); sys.exit(main(['--help']))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
