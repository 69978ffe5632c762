"""The `diptych` command: picks the command and turns our errors into one line and an exit status.

A command's module is imported only when it runs, so that `diptych --help` is instant.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych import __version__
from diptych.errors import ConfigError, DiptychError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """One subcommand: its name, a line for the overview, and what runs it (its arguments -> exit status)."""

    name: str
    summary: str
    run: Callable[[Sequence[str]], int]


def _serve(arguments: Sequence[str]) -> int:
    from diptych.cli import serve

    return serve.run(arguments)


def _pd(arguments: Sequence[str]) -> int:
    from diptych.cli import pd

    return pd.run(arguments)


def _route(arguments: Sequence[str]) -> int:
    from diptych.cli import route

    return route.run(arguments)


def _top(arguments: Sequence[str]) -> int:
    from diptych.cli import top

    return top.run(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from diptych.cli import doctor

    return doctor.run(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from diptych.cli import bench

    return bench.run(arguments)


# Every command is registered here, and nowhere else.
COMMANDS = (
    Command("serve", "serve a model over HTTP (OpenAI-compatible)", _serve),
    Command("pd", "serve a model with prefill and decode apart, on this machine", _pd),
    Command("route", "route requests to prefill, decode or unified engines", _route),
    Command("top", "show engines live: requests, queues, KV pool, transfers", _top),
    Command("bench", "measure an engine or a running server", _bench),
    Command("doctor", "what is installed here, what would be used, and why", _doctor),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) name; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: _dispatch(given))


def guarded(work: Callable[[], int]) -> int:
    """Exit status of `work`, or of what it raises; one of our errors is one line on standard error."""
    try:
        return work()
    except ConfigError as error:
        print(f"diptych: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except DiptychError as error:
        print(f"diptych: {error.code}: {_one_line(error)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`diptych serve --help | head`): keep Python's own flush at exit quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"diptych {__version__}")
        return EXIT_OK
    for command in COMMANDS:
        if command.name == arguments[0]:
            return command.run(arguments[1:])
    names = [command.name for command in COMMANDS]
    nearest = difflib.get_close_matches(arguments[0], names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"the commands are {', '.join(names)}"
    raise ConfigError(f"unknown command {arguments[0]!r}; {hint}")


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    rows = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            f"diptych {__version__}: an LLM serving engine",
            "",
            "usage: diptych COMMAND [OPTIONS]     (diptych COMMAND --help lists the options)",
            "",
            *rows,
            "",
            "With no model named, `diptych serve` serves the demo model at http://127.0.0.1:30000.",
        ]
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
