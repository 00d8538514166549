"""`kvoffload bench`: a distribution of its own, kvoffload-bench, found by an entry point when the command is given."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from kvoffload.terminal.console import CommandError

NAME = "bench"
GROUP = "kvoffload.commands"  # of entry points; each names a module with `add_parser(commands)`


def add_parser(commands: Any, *, wanted: bool) -> None:
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
