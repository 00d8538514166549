"""The command line: `kvoffload` and `python -m kvoffload`.

    doctor          checks GPU, packages and limits, and gives remedies                    doctor.py
    demo            a synthetic chat workload, every byte verified                         demo.py
    replay          a trace or synthetic traffic through the cache                         kvoffload.replay
    pool            serves memory that the engines of a host share                         pool.py
    session         inspects, verifies and converts files of conversations                    session.py
    bench           measurements: the distribution kvoffload-bench
    tune            measures the cost of transfers on this machine                         tune.py

Each command module has `add_parser(commands)`. The parsed arguments have a function `run`, which takes them and returns
the exit code; None is 0. `kvoffload --help` lists the exit codes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from kvoffload import __version__
from kvoffload.commands import demo, doctor, pool, session, tune
from kvoffload.errors import KVOffloadError
from kvoffload.replay import command as replay
from kvoffload.terminal.console import CommandError, OutputError, ReaderEndedError, discard_out, write_error, write_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, `sys.argv[1:]` by default, and return its exit code. Only its result goes to standard output."""
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            arguments = build_parser(words[0] if words else "").parse_args(words)
        except SystemExit as ended:  # --help, or bad usage, which argparse has explained
            return ended.code if isinstance(ended.code, int) else 2
        return int(arguments.run(arguments) or 0)
    except (CommandError, KVOffloadError) as error:
        write_error(f"kvoffload: error: {error}")
        return 2
    except MemoryError as error:
        reason = str(error) or "Python could not allocate more"
        write_error(f"kvoffload: error: host memory is short: {reason}; choose smaller numbers for the options")
        return 2
    except ReaderEndedError:  # nothing went wrong: `kvoffload tune --show | head`
        discard_out()
        return 128 + signal.SIGPIPE  # as the shell says of a program that the signal has ended
    except OutputError as error:
        write_error(f"kvoffload: error: {error}")
        discard_out()
        return 3
    except KeyboardInterrupt:
        write_error("kvoffload: interrupted")
        return 130


class _Parser(argparse.ArgumentParser):
    """Refuses unknown arguments itself, so that it prints the sub-command's usage, in lines of 80 columns. It reports
    failures to write help and version, which argparse ignores.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}; `{self.prog} --help` lists the options")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        write_error(self.format_usage().strip())
        write_error(f"{self.prog}: error: {message}")
        self.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            write_out(message)
        else:
            super()._print_message(message, file)


_OVERVIEW = """\
usage: kvoffload COMMAND [options]    kvoffload COMMAND --help

Move blocks of a paged KV cache between the GPU and pinned host memory.
Every command verifies all bytes that it moves, and also runs without a GPU.

commands:
  doctor    what works here, and how to fix the rest
      kvoffload doctor
  demo      a chat workload through the cache, every byte verified
      kvoffload demo
  replay    hit rates of your trace, or of synthetic traffic
      kvoffload replay --workload chat --slots 2048 --metadata-only --policy all
  pool      one pool of host memory for the engines of a host
      kvoffload pool serve /run/kvoffload/pool --bytes 64GiB
  session   what a file of a conversation says, and whether it is whole
      kvoffload session verify chat.kv
  tune      measure the cost of transfers on this machine
      kvoffload tune
  bench     compare copy methods, with and without concurrent computation
      kvoffload bench field --quick

exit codes: 0 done; 1 a byte was wrong, or doctor found a failure; 2 refused or
            failed; 3 standard output could not be written; 130 interrupted;
            141 its reader has ended
more: docs/command-line.md
"""


class _Overview(_Parser):
    """Its help shows the purpose of each command, an example, and the exit codes."""

    def format_help(self) -> str:
        return _OVERVIEW


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Make the parser of all commands. Only `command="bench"` looks for the benchmarks; CommandError: not installed."""
    parser = _Overview(prog="kvoffload", usage="%(prog)s COMMAND [options]")
    parser.add_argument("--version", action="version", version=f"kvoffload {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", prog="kvoffload", parser_class=_Parser)
    for module in (doctor, demo, replay, pool, session, tune):
        module.add_parser(commands)
    _add_benchmarks(commands, wanted=command == NAME)
    parser.set_defaults(run=lambda _: parser.print_help())
    return parser


# benchmarks -----------------------------------------------------------------------------------------------------------


NAME = "bench"
GROUP = "kvoffload.commands"  # of entry points; each names a module with `add_parser(commands)`


def _add_benchmarks(commands: Any, *, wanted: bool) -> None:
    """Add the benchmarks' parser if it is wanted, else only its name. CommandError if they are not installed."""
    if not wanted:
        commands.add_parser(NAME)
        return
    found = metadata.entry_points(group=GROUP, name=NAME)
    if not found:
        raise CommandError(
            "the benchmarks are not installed: they are a distribution of their own, in the same repository; in a "
            "checkout of it: pip install ./benchmarks"
        )
    found[NAME].load().add_parser(commands)
